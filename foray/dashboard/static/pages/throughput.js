// Speed: tokens, groups and searches per second, and where the time of a step goes.

import { get } from "../api.js";
import { chart } from "../charts.js";
import { card, fill, h, number, percent, short, span } from "../dom.js";

const CAUSES = ["wait", "compute", "publish", "checkpoint", "redis", "validation"];
const PHASES = ["gather", "prepare", "transfer", "verify", "commit", "disk"];
const NAMES = [
  "step_s", "tokens_trained", "tokens_sampled", "tokens_read", "tokens_generated_per_s", "devices", "groups_per_s", "trajectories_per_s",
  "trajectories", "searches_mean", "padding_share", "rank_balance", "zero_advantage_share",
  ...CAUSES.map((c) => `seconds/${c}`), ...PHASES.map((p) => `publish_${p}_s`),
];

export async function show(box, _, context) {
  const charts = {
    tokens: chart("Tokens per second"),
    groups: chart("Groups and trajectories trained per second"),
    searches: chart("Searches per second", { note: "of the trained trajectories" }),
    step: chart("Seconds of a step", { stacked: true, note: "by cause" }),
    publish: chart("Seconds of the last publication", { stacked: true, note: "by phase" }),
    useful: chart("Use of the batch", { note: "shares" }),
    device: chart("Trained tokens per device second", { note: "GPUs of learner and engines, on CPUs their processes" }),
  };
  const cards = h("div", { class: "cards" });
  fill(box, h("h1", { class: "hidden" }, "Throughput"), cards, h("div", { class: "grid" }, Object.values(charts).map((c) => c.element)));

  async function refresh() {
    const steps = await get("/api/steps", { names: NAMES.join(",") });
    const x = steps.step;
    const col = (name) => steps.columns[name];
    const per = (a, b) => col(a).map((v, i) => (v === null || !col(b)[i] ? null : v / col(b)[i]));
    const searches = col("searches_mean").map((v, i) => (v === null || !col("step_s")[i] ? null : (v * col("trajectories")[i]) / col("step_s")[i]));
    charts.tokens.set(x, [{ label: "generated", values: col("tokens_generated_per_s") }, { label: "trained", values: per("tokens_trained", "step_s") }, { label: "read by the learner", values: per("tokens_read", "step_s") }]);
    charts.groups.set(x, [{ label: "groups", values: col("groups_per_s") }, { label: "trajectories", values: col("trajectories_per_s") }]);
    charts.searches.set(x, [{ label: "searches", values: searches }]);
    charts.step.set(x, CAUSES.map((cause) => ({ label: cause, values: col(`seconds/${cause}`) })));
    charts.publish.set(x, PHASES.map((phase) => ({ label: phase, values: col(`publish_${phase}_s`) })));
    charts.useful.set(x, [{ label: "padding", values: col("padding_share") }, { label: "no learning signal", values: col("zero_advantage_share") }, { label: "balance of ranks", values: col("rank_balance") }]);
    const price = context.overview.device_price;
    const spent = col("devices").map((v, i) => (v === null ? null : v * col("step_s")[i]));
    charts.device.set(x, [{ label: "tokens", values: col("tokens_trained").map((v, i) => (spent[i] ? v / spent[i] : null)) }]);
    const sum = (values) => values.reduce((a, b) => a + (b || 0), 0);
    const recent = (name) => sum(col(name).slice(-20)) * steps.width;
    const seconds = recent("step_s");
    const { tokens_per_s: rates, step_s: mean } = context.overview; // as status and top show
    const when = rates.steps ? `tokens, last ${number(rates.steps)} steps` : "tokens, now";
    const rate = (value) => (value === null ? "–" : `${number(value)}/s`);
    fill(cards, card("generated", rate(rates.generated), when), card("trained", rate(rates.trained), when),
      card("step time", mean === null ? "–" : span(mean), "recent mean"),
      card("learner waits", percent(recent("seconds/wait") / seconds), "of recent time"),
      price ? card("cost so far", number((price * sum(spent) * steps.width) / 3600, 2), `at ${short(price)} per device hour`) : null,
      card("tokens trained", number(sum(col("tokens_trained")) * steps.width), "in all"));
  }
  await refresh();
  return { refresh, destroy: () => Object.values(charts).forEach((c) => c.destroy()), shown: () => Object.values(charts).forEach((c) => c.draw()) };
}
