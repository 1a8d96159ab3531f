// The logs of the run's processes: the end of one, its newest entry first, errors marked.

import { get } from "../api.js";
import { badge, clock, fill, h, number, panel } from "../dom.js";

export async function show(box, where) {
  let name = where.rest[0] ?? "";
  let shown = "";
  const only = h("input", { type: "checkbox", onchange: () => refresh(true) });
  const chips = h("nav", { class: "chips", "aria-label": "logs" });
  const title = h("span", {});
  const body = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Logs"), chips, panel(title, h("label", {}, only, " only errors"), body));

  async function refresh(now = false) {
    // what somebody reads or marks stays where it is
    if (now !== true && (scrollY > 200 || String(getSelection()))) return;
    const found = await get("/api/logs", { name });
    const state = JSON.stringify([found, only.checked]);
    if (state === shown) return;
    shown = state;
    const links = [...chips.children].map((link) => link.dataset.name);
    if (links.join() !== found.files.map((f) => f.name).join()) fill(chips, found.files.map((f) =>
      h("a", { class: "chip", "data-name": f.name, href: `#/logs/${encodeURIComponent(f.name)}` }, f.name)));
    for (const link of chips.children) {
      if (link.dataset.name === found.name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const file = found.files.find((f) => f.name === found.name);
    const entries = found.entries.filter((e) => e.error || !only.checked);
    fill(title, file ? `logs/${file.name}.log, ${number(file.bytes / 1024, 1)} KiB, written ${clock(file.written)}` : "no process has written a log here");
    fill(body, entries.length ? h("ol", { class: "log" }, entries.map((e) => h("li", { class: e.error ? "error" : "" },
      e.error ? badge("error", "bad") : null, h("pre", {}, e.text))))
      : h("p", { class: "dim" }, only.checked ? "no errors in the end of this log" : "nothing yet"));
  }
  await refresh(true);
  return { refresh, move: (to) => { name = to.rest[0] ?? ""; refresh(true); return true; } };
}
