// Elements from data. Texts become text nodes: nothing of a run is ever parsed as HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

export const dash = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return dash;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Three significant places or so: 0.0123, 1.23, 12.3, 1,234
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return dash;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return number(value);
  if (size >= 100) return number(value);
  if (size >= 1) return number(value, size >= 10 ? 1 : 2);
  return size >= 0.001 ? number(value, 3) : value.toExponential(1);
}

export function percent(value) {
  return value === null || value === undefined ? dash : `${number(100 * value, Math.abs(value) < 0.1 ? 1 : 0)}%`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return dash;
  if (seconds > 0 && seconds < 0.1) return `${number(1000 * seconds, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 90) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("en-GB") : dash;
}

export function card(label, value, note = "") {
  return h("div", { class: "card" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value),
    note ? h("div", { class: "note" }, note) : null);
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...children);
}

// columns: [{title, cell(row), num}]. Wide tables scroll inside their frame.
export function table(columns, rows, { empty = "nothing to show", caption = "" } = {}) {
  if (!rows.length) return h("p", { class: "dim" }, empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.num ? "num" : "" }, c.title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((c) => h("td", { class: c.num ? "num" : "" }, c.cell(row))))))));
}

// A row of labelled bars for a histogram: [[label, value, text]]. `most`: the value of a full bar.
export function bars(rows, { empty = "nothing recorded yet", most = Math.max(...rows.map((row) => row[1]), 1e-12) } = {}) {
  if (!rows.length) return h("p", { class: "dim" }, empty);
  return h("div", { class: "bars" }, rows.map(([label, value, text]) => {
    const bar = h("div", { class: "bar" });
    bar.style.width = value ? `max(1px, ${(100 * value) / most}%)` : "0";
    return [h("div", { class: "bar-label" }, label), h("div", { class: "bar-track" }, bar), h("div", { class: "bar-value" }, text)];
  }));
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

// Text with every occurrence of one of `words` marked, case ignored.
export function marked(text, words) {
  const wanted = words.map((w) => w.trim()).filter((w) => w.length > 0).map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!wanted.length) return [text];
  return text.split(new RegExp(`(${wanted.join("|")})`, "gi")).map((part, i) => (i % 2 ? h("mark", { title: "a gold answer" }, part) : part));
}
