// The settings of the run, and which of them differ from the defaults.

import { get } from "../api.js";
import { badge, fill, h, number, panel, table } from "../dom.js";

export async function show(box) {
  const { file, note, settings } = await get("/api/settings");
  const differs = (s) => s.default !== null && s.value !== s.default;
  const known = settings.some((s) => s.default !== null);
  const only = h("input", { type: "checkbox", id: "differs", checked: known, onchange: draw });
  const find = h("input", { type: "search", id: "find", oninput: draw });
  const count = h("p", { class: "dim", role: "status" });
  const body = h("div", { class: "settings" });

  function draw() {
    const word = find.value.trim().toLowerCase();
    const rows = settings.filter((s) => (!only.checked || differs(s)) && `${s.name} ${s.value}`.toLowerCase().includes(word));
    fill(count, `${number(rows.length)} of ${number(settings.length)} settings; ${number(settings.filter(differs).length)} differ from the defaults`);
    fill(body, table([
      { title: "setting", cell: (s) => [s.name, differs(s) && !only.checked ? [" ", badge("differs")] : null] },
      { title: "value", cell: (s) => h("code", {}, s.value) }, { title: "default", cell: (s) => h("code", {}, s.default ?? "–") },
    ], rows, { empty: "no such setting", caption: "settings" }));
  }
  draw();
  fill(box, h("h1", { class: "hidden" }, "Settings"), panel(file || "Settings", note ? h("p", {}, note) : null,
    h("div", { class: "line" }, h("label", { for: "differs" }, only, " only what differs from the defaults"),
      h("label", { for: "find" }, "find ", find)), count, body));
  return {};
}
