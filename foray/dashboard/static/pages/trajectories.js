// The table of trained trajectories, with filters and search. The filter is in the address.

import { get } from "../api.js";
import { badge, fill, h, number, short } from "../dom.js";

const ORDERS = { newest: "newest first", oldest: "oldest first", best: "highest reward", worst: "lowest reward", longest: "longest", stalest: "stalest" };
const FIELDS = ["text", "status", "source", "signal", "order", "reward_min", "reward_max", "step_min", "step_max", "version", "seq"];
const LIMIT = 50;

export async function show(box, where, context) {
  const facets = await get("/api/facets");
  const fields = {};
  const input = (name, props) => (fields[name] = h("input", { name, id: `f-${name}`, autocomplete: "off", ...props }));
  const select = (name, options) => (fields[name] = h("select", { name, id: `f-${name}` }, options.map(([value, text]) => h("option", { value }, text))));
  const labelled = (text, ...controls) => h("label", {}, h("span", {}, text), ...controls);
  const range = (name, step) => h("div", { class: "range", role: "group", "aria-label": name }, h("span", {}, name),
    input(`${name}_min`, { type: "number", step, placeholder: short(facets[name][0]), "aria-label": `${name} from` }), "–",
    input(`${name}_max`, { type: "number", step, placeholder: short(facets[name][1]), "aria-label": `${name} to` }));
  const counted = (found) => Object.entries(found).filter(([name]) => name).map(([name, n]) => [name, `${name} (${number(n)})`]);
  const form = h("form", { class: "filters", role: "search" },
    labelled("search", input("text", { type: "search", placeholder: "question, answer, queries  ( / )" })),
    h("details", { open: matchMedia("(min-width: 700px)").matches }, h("summary", {}, "filters and order"), h("div", { class: "more" },
    labelled("status", select("status", [["", "any"], ...counted(facets.status)])),
    labelled("source", select("source", [["", "any"], ...counted(facets.source)])),
    labelled("learning signal", select("signal", [["", "any"], ["some", "rewards of the group differ"], ["none", "all rewards equal"]])),
    labelled("order", select("order", Object.entries(ORDERS))),
    range("reward", "any"), range("step", "1"),
    labelled("version", input("version", { placeholder: "1.20", size: 7 })), labelled("seq", input("seq", { type: "number", min: 1 })),
    h("button", { type: "reset" }, "clear"))));
  const status = h("p", { class: "dim", role: "status" });
  const fresh = h("button", { class: "fresh", hidden: true, onclick: () => load(current) });
  const body = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Trajectories"), form, h("div", { class: "line" }, status, fresh), body);
  let current = {};
  let rows = [];
  let chosen = -1;
  let indexed = 0;

  function read() {
    const query = {};
    for (const name of FIELDS) {
      const value = fields[name].value.trim();
      if (value && !(name === "order" && value === "newest")) query[name] = value;
    }
    return query;
  }
  function address(query) {
    const text = new URLSearchParams(query).toString();
    return text ? `#/trajectories?${text}` : "#/trajectories";
  }
  let timer = null;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      context.replace(address(read()));
      load(read());
    }, 200);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => context.go(address({}))));

  async function load(query) {
    current = query;
    const began = query;
    let page;
    try {
      page = await get("/api/trajectories", { limit: LIMIT, ...query });
    } catch (error) {
      fill(status, error.message);
      return fill(body);
    }
    if (began !== current) return;
    rows = []; // neighbours of one group are one row
    for (const one of page.rows) (rows.at(-1)?.[0].group_id === one.group_id ? rows.at(-1) : rows[rows.push([]) - 1]).push(one);
    chosen = -1;
    indexed = context.overview.index.trajectories;
    fresh.hidden = true;
    const more = context.overview.index.journal - context.overview.index.groups;
    const end = page.offset + page.rows.length;
    fill(status, page.total ? `${number(page.offset + 1)} to ${number(end)} of ${number(page.total)}` : "no trajectory matches",
      more > 0 ? `; ${number(more)} groups of the journal are still being read` : "");
    const to = (offset) => address({ ...query, offset });
    fill(body, rows.length ? list(page) : null, h("div", { class: "pager" },
      page.offset > 0 ? h("a", { href: to(Math.max(0, page.offset - LIMIT)) }, "← previous") : null,
      end < page.total ? h("a", { href: to(end) }, "next →") : null));
  }
  function list() {
    const head = ["step", "question", "answer", "reward", "status", "turns", "searches", "tokens", "lag", "version", "seq"];
    const num = new Set(["step", "reward", "turns", "searches", "tokens", "lag", "seq"]);
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "trajectories" }, h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: num.has(name) ? "num" : "" }, name)))),
      h("tbody", {}, rows.map((of, i) => ((row = of[0]) => h("tr", { id: `row-${i}`, onclick: () => open(i) },
        h("td", { class: "num" }, number(row.step)),
        h("td", { class: "long" }, h("a", { href: link(row) }, row.question)), h("td", { class: "long" }, row.answer || "–"),
        h("td", { class: "num rewards" }, of.map((one) => [h("a", { href: link(one), onclick: (event) => event.stopPropagation() },
          badge(short(one.reward), one.reward > one.group_reward ? "good" : one.reward < one.group_reward ? "bad" : "plain")), " "])),
        h("td", {}, row.status, row.rolled_back ? badge("rolled back", "bad") : null, row.errors ? badge(`${row.errors} errors`, "bad") : null),
        h("td", { class: "num" }, mean(of, "turns")), h("td", { class: "num" }, mean(of, "searches")), h("td", { class: "num" }, mean(of, "sampled")),
        h("td", { class: "num" }, mean(of, "lag")), h("td", {}, row.first_version === row.last_version ? row.last_version : `${row.first_version} to ${row.last_version}`),
        h("td", { class: "num" }, row.seq)))())))); // answer, status and version of the first, means of the others
  }
  function mean(of, name) {
    return short(of.reduce((sum, one) => sum + one[name], 0) / of.length);
  }
  function link(row) {
    return `#/group/${row.seq}/${row.place}?epoch=${row.epoch}`;
  }
  function open(i) {
    context.go(link(rows[i][0]));
  }
  function choose(i) {
    document.getElementById(`row-${chosen}`)?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(rows.length - 1, i));
    const row = document.getElementById(`row-${chosen}`);
    row?.classList.add("chosen");
    row?.scrollIntoView({ block: "nearest" });
  }
  async function move({ query }) {
    const { focus, ...rest } = query;
    for (const name of FIELDS) fields[name].value = rest[name] ?? (name === "order" ? "newest" : "");
    await load(rest);
    if (focus) fields.text.focus();
    return true;
  }
  await move({ query: where.query });
  return {
    move(next) {
      move(next);
      return true;
    },
    shown() {
      if (where.query.focus) fields.text.focus();
    },
    refresh() {
      const more = context.overview.index.trajectories - indexed;
      fresh.hidden = more <= 0;
      fill(fresh, `show ${number(more)} new`);
    },
    key(key) {
      if (key === "/") fields.text.focus();
      else if (key === "j") choose(chosen + 1);
      else if (key === "k") choose(chosen - 1);
      else if (key === "Enter" && chosen >= 0) open(chosen);
      else return false;
      return true;
    },
  };
}
