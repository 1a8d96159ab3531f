// How old the training data are, what was masked for it, and what the algorithm's ratios say.

import { get } from "../api.js";
import { chart } from "../charts.js";
import { bars, fill, h, number, panel, percent } from "../dom.js";

const NAMES = [
  "lag_mean", "lag_max", "group_lag_mean", "tokens_stale", "tokens_orphan", "tokens_invalid", "ratio_mean", "ratio_max", "ess",
  "clip_fraction", "rejected", "kl_behaviour", "kl_reference", "logprob_gap",
];

export async function show(box, _, context) {
  const charts = {
    lag: chart("Lag", { note: "steps between the sampling version and the policy" }),
    versions: chart("Versions in a batch", { note: "of its sampled tokens, by step of the version" }),
    ages: chart("Sampled tokens by lag", { stacked: true, percent: true, note: "share of each step" }),
    masked: chart("Masked tokens", { stacked: true, note: "sampled, not trained on" }),
    ratio: chart("Importance ratio"),
    clip: chart("Clipped and rejected", { note: "share of tokens" }),
    ess: chart("Effective sample size", { note: "share of tokens" }),
    drift: chart("Divergence", { note: "nats per token" }),
  };
  const histograms = h("div", { class: "two" });
  fill(box, h("h1", { class: "hidden" }, "Staleness"), histograms, h("div", { class: "grid" }, Object.values(charts).map((c) => c.element)));

  async function refresh() {
    const [steps, ages] = await Promise.all([get("/api/steps", { names: NAMES.join(",") }), get("/api/staleness")]);
    const bound = context.overview.max_lag;
    const rows = (list) => {
      const all = list.reduce((sum, [, n]) => sum + n, 0) || 1;
      return list.map(([lag, n]) => [`lag ${lag}${lag > bound ? " (above the bound)" : ""}`, n, `${number(n)} (${percent(n / all)})`]);
    };
    fill(histograms, panel("Tokens by lag", h("p", { class: "dim" }, `sampled tokens in the journal; the bound is ${bound}`), bars(rows(ages.tokens))),
      panel("Groups by lag", h("p", { class: "dim" }, "by the oldest token of the group"), bars(rows(ages.groups))), discarded(context.overview));
    const x = steps.step;
    const col = (name) => steps.columns[name];
    charts.lag.set(x, [{ label: "mean", values: col("lag_mean") }, { label: "largest", values: col("lag_max") }, { label: "groups", values: col("group_lag_mean") }, { label: "bound", values: x.map(() => bound) }]);
    const at = [...new Set(ages.steps.map((r) => r[0]))];
    const lags = [...new Set(ages.steps.map((r) => r[1]))].sort((a, b) => a - b).slice(0, 7);
    const known = new Map(ages.steps.map(([step, lag, n]) => [`${step} ${lag}`, n]));
    charts.ages.set(at, lags.map((lag) => ({ label: `lag ${lag}`, values: at.map((step) => known.get(`${step} ${lag}`) ?? 0) })));
    const ends = at.map((step) => {
      const mine = ages.steps.filter((row) => row[0] === step).map((row) => row[1]);
      return [step - 1, step - 1 - Math.min(...mine), step - 1 - Math.max(...mine)];
    });
    charts.versions.set(at, ["policy that is updated", "newest", "oldest"].map((label, i) => ({ label, values: ends.map((e) => e[i]) })));
    charts.masked.set(x, [{ label: "too old", values: col("tokens_stale") }, { label: "rolled back", values: col("tokens_orphan") }, { label: "invalid trajectory", values: col("tokens_invalid") }]);
    charts.ratio.set(x, [{ label: "mean", values: col("ratio_mean") }, { label: "largest", values: col("ratio_max") }]);
    charts.clip.set(x, [{ label: "clipped", values: col("clip_fraction") }, { label: "rejected", values: col("rejected") }]);
    charts.ess.set(x, [{ label: "effective sample size", values: col("ess") }]);
    charts.drift.set(x, [{ label: "from the engines", values: col("kl_behaviour") }, { label: "from the reference", values: col("kl_reference") }, { label: "log-prob gap", values: col("logprob_gap") }]);
  }
  await refresh();
  return { refresh, destroy: () => Object.values(charts).forEach((c) => c.destroy()), shown: () => Object.values(charts).forEach((c) => c.draw()) };
}

// Everything that was generated and not trained on, since the run began.
function discarded(seen) {
  const questions = [["filtered: no learning signal, or left over", "filtered"], ["stale", "stale"], ["dead: gave up", "dead"]];
  const tokens = [["masked in a trained group", "masked"], ["of filtered groups", "filtered"], ["of stale groups", "stale"], ["of failed groups", "failed"], ["of groups that came twice", "duplicate"]];
  const rows = (names, values) => names.filter(([, name]) => values[name]).map(([label, name]) => [label, values[name], number(values[name])]);
  return panel("Discarded by cause", h("h3", {}, "questions"), bars(rows(questions, seen.ledger), { empty: "none" }),
    h("h3", {}, "tokens"), bars(rows(tokens, seen.tokens?.parts ?? {}), { empty: "none" }));
}
