// Router, header, events and keys. The address after # says what is shown, so that every view has a link.

import { get, listen, onToken } from "./api.js";
import { redrawAll } from "./charts.js";
import { badge, fill, h, number, span } from "./dom.js";
import * as accounting from "./pages/accounting.js";
import * as chat from "./pages/chat.js";
import * as evaluations from "./pages/evaluations.js";
import * as fleet from "./pages/fleet.js";
import * as group from "./pages/group.js";
import * as live from "./pages/live.js";
import * as logs from "./pages/logs.js";
import * as overview from "./pages/overview.js";
import * as settings from "./pages/settings.js";
import * as staleness from "./pages/staleness.js";
import * as throughput from "./pages/throughput.js";
import * as trajectories from "./pages/trajectories.js";

const TABS = { overview, throughput, staleness, fleet, live, trajectories, accounting, evaluations, logs, settings, chat };
const PAGES = { ...TABS, group };
const KEYS = [
  ["1 to 9, 0, c", "the pages, from left to right"], ["j / k", "next / previous row or trajectory"], ["Enter", "open the row"],
  ["Esc", "back"], ["/", "search the trajectories"], ["t", "tokens of the trajectory"], ["d", "light or dark"], ["?", "this help"],
];
const main = document.getElementById("main");
const state = { list: "#/trajectories", overview: null, live: false, page: null, shown: "" };
let turn = 0;

function parse() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name: PAGES[name] ? name : "overview", rest: rest.map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(search)) };
}

async function route() {
  const mine = ++turn;
  const where = parse();
  const again = state.page && state.shown === where.name && state.page.move?.(where);
  tabs(where.name);
  if (where.name === "trajectories") state.list = location.hash;
  if (again) return;
  state.page?.destroy?.();
  state.page = null;
  state.shown = where.name;
  fill(main, h("p", { class: "dim" }, "loading"));
  try {
    if (!state.overview) state.overview = await get("/api/overview");
    const box = h("div", {});
    const page = await PAGES[where.name].show(box, where, context);
    if (mine !== turn) return page?.destroy?.();
    state.page = page;
    fill(main, box);
    page?.shown?.();
  } catch (error) {
    if (mine === turn) fill(main, h("section", { class: "panel bad" }, h("h2", {}, "This view could not be loaded"), h("p", {}, error.message)));
  }
  header();
}

const context = {
  get overview() {
    return state.overview;
  },
  get list() {
    return state.list;
  },
  replace(path) {
    history.replaceState(null, "", path);
    state.list = path;
  },
  go(path) {
    location.hash = path;
  },
};

function tabs(current) {
  const shown = current === "group" ? "trajectories" : current;
  fill(document.getElementById("tabs"), Object.keys(TABS).map((name) =>
    h("a", { href: `#/${name}`, "aria-current": name === shown ? "page" : undefined }, name)));
  const nav = document.getElementById("tabs"), tab = nav.querySelector("[aria-current]")?.getBoundingClientRect();
  // not by scrollIntoView: in newer browsers Tab would then go on from there, past the link to the content
  const row = nav.getBoundingClientRect();
  if (tab) nav.scrollLeft += Math.min(0, tab.left - row.left) + Math.max(0, tab.right - row.right);
}

function header() {
  const seen = state.overview;
  if (!seen) return;
  document.title = `${seen.run} · Foray`;
  const step = Math.max(seen.figures.step ?? 0, seen.last.step ?? 0);
  const total = seen.figures.steps || seen.steps || 0;
  const bar = h("progress", { max: total || 1, value: Math.min(step, total || 1), "aria-label": "steps" });
  const healthy = seen.problems.length === 0;
  fill(document.getElementById("top"),
    h("a", { class: "brand", href: "#/overview" }, "foray"), h("strong", { class: "run" }, seen.run),
    badge(seen.state, seen.state === "failed" || seen.state === "down" ? "bad" : "plain"),
    healthy ? badge("✓ healthy", "good") : badge(`! ${seen.problems.length} problem${seen.problems.length > 1 ? "s" : ""}`, "bad"),
    h("span", { class: "grow progress" }, bar, h("span", {}, `step ${number(step)} of ${number(total)}`,
      seen.eta_s !== null ? `, ${span(seen.eta_s)} left` : "")),
    h("span", { class: "live", title: "events of the server" }, seen.is_over ? "○ the run is over" : state.live ? "● live" : "○ reconnecting"),
    h("button", { class: "icon", onclick: theme, title: "light or dark (d)", "aria-label": "light or dark" }, "◐"),
    h("button", { class: "icon", onclick: help, title: "keys (?)", "aria-label": "keyboard help" }, "?"));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("foray-theme", root.dataset.theme);
  redrawAll();
}

function overlay(...children) {
  const before = document.activeElement;
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, ...children);
  document.getElementById("overlay").append(dialog);
  dialog.addEventListener("close", () => {
    dialog.remove();
    before?.focus?.();
  });
  dialog.showModal();
  return dialog;
}

function help() {
  if (document.querySelector("dialog")) return;
  const dialog = overlay(h("h2", { id: "dialog-title" }, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("button", { onclick: () => dialog.close() }, "close"));
}

let waiting = null;
onToken((why) => {
  waiting ??= new Promise((resolve) => {
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
    const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, "This run needs a token"), h("p", {}, why),
      h("label", { for: "token" }, "Token of the role viewer or operator"), field, h("button", {}, "open"));
    form.addEventListener("submit", () => {
      waiting = null;
      resolve(field.value.trim());
    });
    overlay(form).addEventListener("cancel", (event) => event.preventDefault());
    field.focus();
  });
  return waiting;
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape") {
    if (typing) {
      event.preventDefault(); // which would empty a search field
      return event.target.blur();
    }
    return state.page?.key?.("Escape") || (state.shown === "group" && context.go(state.list));
  }
  if (typing) return;
  const place = "1234567890".indexOf(event.key);
  if (place >= 0 && event.key) context.go(`#/${Object.keys(TABS)[place]}`);
  else if (event.key === "c") context.go("#/chat");
  else if (event.key === "?") help();
  else if (event.key === "d") theme();
  else if (event.key === "/") {
    event.preventDefault();
    if (state.shown === "trajectories") state.page?.key?.("/");
    else context.go("#/trajectories?focus=1");
  } else if (event.key !== "Enter" || event.target === document.body || event.target === main) {
    if (state.page?.key?.(event.key)) event.preventDefault();
  }
});

let pending = null;
function changed(kind, data) {
  if (kind === "reload") return location.reload();
  state.page?.event?.(kind, data);
  // several events of one look lead to one request
  pending ??= setTimeout(async () => {
    pending = null;
    try {
      state.overview = await get("/api/overview");
      header();
      await state.page?.refresh?.();
    } catch {
      // the next event tries again
    }
  }, 400);
}

const chosen = localStorage.getItem("foray-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("hashchange", route);
await route();
listen(changed, (live) => {
  state.live = live;
  header();
});
