// Validation during training, and the results of `foray eval` for this run.

import { get } from "../api.js";
import { chart } from "../charts.js";
import { clock, fill, h, number, panel, short, span, table } from "../dom.js";

export async function show(box) {
  const charts = { em: chart("Exact match"), f1: chart("F1"), searches: chart("Searches per question") };
  const grid = h("div", { class: "grid" }, Object.values(charts).map((c) => c.element));
  const body = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Evaluations"), grid, body);

  async function refresh() {
    const { validations, results } = await get("/api/evaluations");
    const ordered = [...validations].sort((a, b) => a.step - b.step);
    const suites = [...new Set(ordered.flatMap((v) => Object.keys(v.suites)))];
    grid.hidden = !ordered.length;
    for (const [metric, c] of Object.entries(charts))
      c.set(ordered.map((v) => v.step), suites.map((name) => ({ label: name, points: true, values: ordered.map((v) => v.suites[name]?.[metric] ?? null) })));
    const rows = ordered.flatMap((v) => Object.entries(v.suites).map(([suite, means]) => ({ ...v, suite, means }))).reverse();
    fill(body, panel("Validation during training", table([
      { title: "step", num: true, cell: (r) => number(r.step) }, { title: "suite", cell: (r) => r.suite },
      { title: "exact match", num: true, cell: (r) => `${short(r.means.em)}${r.means.em_stderr ? ` ± ${short(1.96 * r.means.em_stderr)}` : ""}` },
      { title: "F1", num: true, cell: (r) => short(r.means.f1) }, { title: "reward", num: true, cell: (r) => short(r.means.reward) },
      { title: "searches", num: true, cell: (r) => short(r.means.searches) }, { title: "tokens", num: true, cell: (r) => short(r.means.tokens_generated) },
      { title: "questions", num: true, cell: (r) => number(r.means.questions) }, { title: "failed", num: true, cell: (r) => number(r.means.failed) },
      { title: "version", cell: (r) => r.version }, { title: "time", num: true, cell: (r) => span(r.seconds) },
    ], rows, { empty: "none: learner.eval sets it up", caption: "validations" })),
    results.length ? results.map((one) => panel(`${one.name}`, h("p", { class: "dim" }, clock(one.written)), table([
      { title: "method", cell: (r) => r.method }, { title: "data set", cell: (r) => r.data_set },
      { title: "exact match", num: true, cell: (r) => estimate(r.metrics.em) }, { title: "F1", num: true, cell: (r) => estimate(r.metrics.f1) },
      { title: "searches", num: true, cell: (r) => short(r.searches) }, { title: "tokens", num: true, cell: (r) => short(r.tokens_generated) },
      { title: "episodes", num: true, cell: (r) => number(r.episodes) }, { title: "failed", num: true, cell: (r) => number(r.failed) },
    ], one.result.scores, { caption: one.name }))) : panel("foray eval", h("p", { class: "dim" }, "no result names this run")));
  }
  await refresh();
  return { refresh, destroy: () => Object.values(charts).forEach((c) => c.destroy()), shown: () => Object.values(charts).forEach((c) => c.draw()) };
}

function estimate(found) {
  return found ? `${short(found.mean)} [${short(found.low)}, ${short(found.high)}]` : "–";
}
