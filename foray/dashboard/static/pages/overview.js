// What the run does, whether it is well, and how it learns.

import { get } from "../api.js";
import { chart } from "../charts.js";
import { bars, card, clock, fill, h, number, panel, percent, short, span } from "../dom.js";

const CAUSES = ["wait", "compute", "publish", "checkpoint", "redis", "validation"];
const SIGNS = ["logprob_right", "logprob_wrong", "logprob_change", "fell_trajectories", "fell_turns"];
const NAMES = ["reward_mean", "reward/em", "searches_mean", "response_length_mean", "turns_mean", "entropy", ...SIGNS, ...CAUSES.map((c) => `seconds/${c}`)];

export async function show(box, _, context) {
  const charts = {
    reward: chart("Reward and exact match", { note: "of trained trajectories" }),
    validation: chart("Validation", { note: "exact match on held-out questions" }),
    waits: chart("Who waits for whom", { stacked: true, percent: true, note: "share of each step's time" }),
    behaviour: chart("Searches and turns", { note: "mean of a trajectory" }),
    length: chart("Response length", { note: "tokens" }),
    entropy: chart("Entropy", { note: "nats per token" }),
    likelihood: chart("Log-probs by advantage", { note: "mean of tokens; those with a positive advantage should not fall" }),
    fell: chart("Good answers that became less likely in the step", { note: "share of a sample" }),
  };
  const any = h("select", { id: "metric", onchange: () => refresh() });
  const other = chart("Chosen metric");
  const cards = h("div", { class: "cards" });
  const health = h("div", {});
  const diagnosis = h("div", {});
  const side = h("div", { class: "two" });
  fill(box, h("h1", { class: "hidden" }, "Overview"), cards, health, diagnosis,
    h("div", { class: "grid" }, Object.values(charts).map((c) => c.element)),
    h("p", {}, h("label", { for: "metric" }, "any field of metrics.jsonl: "), any), other.element, h("p", {}), side);

  let diagnosed = "";

  async function refresh() {
    const { names } = context.overview;
    const chosen = any.value || "loss";
    if (any.length !== names.length) fill(any, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    const [steps, found] = await Promise.all([get("/api/steps", { names: [...NAMES, any.value].filter(Boolean).join(",") }), get("/api/evaluations")]);
    draw(steps, found.validations);
    get("/api/diagnosis").then((facts) => {
      const text = JSON.stringify(facts);
      if (text !== diagnosed) fill(diagnosis, findings(facts));  // an opened part stays open
      diagnosed = text;
    }, (error) => fill(diagnosis, h("p", { class: "dim" }, `diagnosis: ${error.message}`)));
  }
  function draw(steps, validations) {
    const seen = context.overview;
    const last = { ...seen.last, ...seen.figures }; // as status and top show
    const rate = (value, what) => (value === null ? "" : `${number(value)} tokens/s ${what}`);
    fill(cards,
      card("step", `${number(last.step ?? 0)} / ${number(seen.figures.steps || seen.steps)}`, seen.eta_s === null ? seen.state : `${span(seen.eta_s)} left`),
      card("reward", short(last.reward_mean), trend(steps, "reward_mean")),
      seen.learning.word ? card("learning", seen.learning.word, seen.learning.sign) : null,
      "reward/em" in last ? card("exact match", short(last["reward/em"]), trend(steps, "reward/em")) : null,
      card("searches", short(last.searches_mean), "per trajectory"),
      card("lag", short(last.lag_mean), `largest ${short(last.lag_max)}, bound ${seen.max_lag}`),
      card("step time", span(seen.step_s), rate(seen.tokens_per_s.trained, "trained")));
    const problems = seen.problems.map((p) => h("li", {}, h("strong", {}, p.what), h("div", {}, "→ ", p.todo)));
    if (seen.failure && seen.state === "failed") problems.push(h("li", {}, h("strong", {}, "What the launcher printed"), h("pre", { class: "scroll" }, seen.failure), h("p", {}, h("a", { href: "#/logs" }, "logs of its processes"))));
    fill(health, problems.length ? h("section", { class: "panel bad", role: "status" }, h("h2", {}, "Problems"), h("ul", {}, problems)) : null,
      seen.evaluation_lines.length ? h("p", { class: "dim" }, seen.evaluation_lines.join(" · ")) : null);
    const x = steps.step;
    const col = (name) => steps.columns[name];
    charts.reward.set(x, same(col("reward/em"), col("reward_mean"))
      ? [{ label: "reward (equal to exact match)", values: col("reward_mean") }]
      : [{ label: "reward", values: col("reward_mean") }, { label: "exact match", values: col("reward/em") }]);
    charts.waits.set(x, CAUSES.map((cause) => ({ label: IN_WORDS[cause], values: col(`seconds/${cause}`) })));
    charts.behaviour.set(x, [{ label: "searches", values: col("searches_mean") }, { label: "turns", values: col("turns_mean") }]);
    charts.length.set(x, [{ label: "tokens", values: col("response_length_mean") }]);
    charts.entropy.set(x, [{ label: "entropy", values: col("entropy") }]);
    charts.likelihood.set(x, [{ label: "positive", values: col("logprob_right") }, { label: "negative", values: col("logprob_wrong") }, { label: "change over a step", values: col("logprob_change") }]);
    charts.fell.set(x, [{ label: "trajectories", values: col("fell_trajectories") }, { label: "turns", values: col("fell_turns") }]);
    const suites = [...new Set(validations.flatMap((v) => Object.keys(v.suites)))];
    const ordered = [...validations].sort((a, b) => a.step - b.step);
    charts.validation.set(ordered.map((v) => v.step), suites.map((name) => ({ label: name, points: true, values: ordered.map((v) => v.suites[name]?.em ?? null) })));
    charts.validation.element.hidden = !validations.length;
    other.set(x, any.value in steps.columns ? [{ label: any.value, values: col(any.value) }] : []);
    fill(side, waits(seen), events(seen));
  }
  await refresh();
  return { refresh, destroy: () => [...Object.values(charts), other].forEach((c) => c.destroy()), shown: () => [...Object.values(charts), other].forEach((c) => c.draw()) };
}

const IN_WORDS = {
  wait: "learner waits for trajectories", compute: "learner trains", publish: "publishes weights", checkpoint: "writes checkpoints",
  redis: "waits for Redis", validation: "validates",
};

// What `foray diagnose` finds: the rule that decided, what to try, and the trajectories that show it.
function findings({ findings: found, trajectories }) {
  if (!found.length) return null;
  const one = (f) => h("li", {}, h("strong", {}, f.what), h("ul", { class: "plain" }, f.todo.map((todo) => h("li", {}, "→ ", todo))),
    h("details", {}, h("summary", {}, "why, and trajectories that show it"), h("p", { class: "dim" }, `rule: ${f.rule}`),
      h("ul", {}, f.trajectories.map((t) => h("li", {}, h("a", { href: t.dashboard }, `seq ${t.seq}, trajectory ${t.index + 1}`),
        ` reward ${short(t.reward)}, ${number(t.searches)} searches: ${t.question} → ${t.answer || "(no answer)"} (gold: ${t.gold.join(" | ")})`)))));
  return h("section", { class: "panel bad", role: "status", id: "diagnosis" }, h("h2", {}, "Diagnosis"),
    h("p", { class: "dim" }, `from the steps and the last ${number(trajectories)} trained trajectories; foray diagnose says the same`), h("ul", {}, found.map(one)));
}

function same(a, b) {
  return a.some((v) => v !== null) && a.every((v, i) => v === b[i]);
}

function trend(steps, name) {
  const values = steps.columns[name].filter((v) => v !== null);
  if (values.length < 8) return "";
  const part = Math.min(20, Math.floor(values.length / 4));
  const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const by = mean(values.slice(-part)) - mean(values.slice(0, part));
  return `${by >= 0 ? "▲" : "▼"} ${short(Math.abs(by))} since the start`;
}

function waits(seen) {
  if (!seen.waits.length) return panel("Waiting now", h("p", { class: "dim" }, seen.processes.length ? "no wait of 5 % or more" : "no process is running"));
  const rows = seen.waits.map((line) => [line.replace(/^\s*\d+%\s+/, ""), parseFloat(line) / 100]);
  return panel("Waiting now", h("ul", { class: "plain" }, rows.map(([text, share]) => h("li", {}, bars([["", share, percent(share)]], { most: 1 }), h("span", {}, text)))));
}

function events(seen) {
  const saved = seen.checkpoint ? `checkpoint of step ${seen.checkpoint.step}` : "no checkpoint yet";
  return panel("Events", h("p", { class: "dim" }, saved, seen.state === "stopped" && seen.again ? `; resume with: ${seen.again}` : ""),
    seen.events.length ? h("ul", { class: "plain" }, [...seen.events].reverse().map((e) => h("li", {}, h("span", { class: "dim" }, clock(e.at), " "), `${e.process} ${e.id} `, h("strong", {}, e.kind), `: ${e.text}`)))
      : h("p", { class: "dim" }, "none"));
}
