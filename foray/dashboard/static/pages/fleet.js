// Engines and their versions, rollout servers, nodes and retrievers, as they report now.

import { get, post } from "../api.js";
import { badge, fill, h, number, panel, percent, short, span, table } from "../dom.js";

const GOOD = ["ready"];
const BAD = ["suspect", "quarantined", "gone"];

export async function show(box, _, context) {
  const body = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Fleet"), body);

  // The first click asks for a second one: an engine that drains serves again only after a restart of its node.
  const clicked = new Map();
  let replicas = [];
  let asked = 0;
  function drain(engine) {
    const said = clicked.get(engine.id);
    if (engine.state !== "ready") return "";
    if (said && said !== "sure?") return badge(said, "bad");
    return h("button", { onclick: () => ask(engine.id), "aria-label": `${said ? "really " : ""}drain ${engine.id}` }, said ? "really drain" : "drain");
  }
  async function ask(id) {
    if (!clicked.has(id)) clicked.set(id, "sure?");
    else {
      clicked.set(id, await post(`/api/engines/${encodeURIComponent(id)}/drain`).then(() => "asked to drain", (error) => error.message));
    }
    draw();
    body.querySelector(`[aria-label="really drain ${CSS.escape(id)}"]`)?.focus();
  }
  async function refresh() {
    if (Date.now() - asked > 5000) {
      asked = Date.now();
      replicas = (await get("/api/retrievers")).retrievers;
    }
    draw();
  }
  function draw() {
    const seen = context.overview;
    const of = (kind) => seen.processes.filter((p) => p.process === kind);
    const target = seen.target.version;
    const behind = (version) => (target ? Number(target.split(".")[1]) - Number(version.split(".")[1]) : 0);
    const value = (name, format = number) => (p) => format(p.values[name] ?? null);
    const counter = (name) => (p) => number(p.values[name] ?? 0);
    if (!seen.processes.length && !seen.engines.length)
      return fill(body, panel("Fleet", h("p", {}, `No process of this run reports (${seen.state}).`), h("p", { class: "dim" }, "Engines, rollout servers and retrievers are shown here while the run is up.")));
    fill(body,
      panel("Engines", h("p", { class: "dim" }, target ? `the announced version is ${target} (${seen.target.state})` : "no version is announced"),
        table([
          { title: "engine", cell: (e) => e.id }, { title: "state", cell: (e) => badge(e.state, GOOD.includes(e.state) ? "good" : BAD.includes(e.state) ? "bad" : "plain") },
          { title: "role", cell: (e) => e.role }, { title: "version", cell: (e) => e.version },
          { title: "behind", num: true, cell: (e) => badge(behind(e.version), behind(e.version) > seen.max_lag ? "bad" : "plain") },
          { title: "running", num: true, cell: (e) => number(e.running) }, { title: "waiting", num: true, cell: (e) => number(e.waiting) },
          { title: "tokens/s", num: true, cell: (e) => number(e.tokens_per_s) }, { title: "KV cache", num: true, cell: (e) => percent(e.token_usage) },
          { title: "updates", num: true, cell: (e) => number(e.updates) }, { title: "last pause", num: true, cell: (e) => span(e.pause_s) },
          { title: "retractions", num: true, cell: (e) => number(e.retractions) }, { title: "detail", cell: (e) => e.detail || e.url },
          ...(seen.operator ? [{ title: "", cell: drain }] : []),
        ], seen.engines, { empty: "no engine is registered", caption: "engines" })),
      panel("Rollout servers", table([
        { title: "server", cell: (p) => p.id }, { title: "up", num: true, cell: (p) => span(p.uptime_s) },
        { title: "groups in flight", num: true, cell: value("groups_in_flight") }, { title: "trajectories", num: true, cell: value("trajectories_in_flight") },
        { title: "published", num: true, cell: counter("groups_published") }, { title: "failed", num: true, cell: counter("groups_failed") },
        { title: "tokens/s", num: true, cell: value("tokens_generated_per_s") }, { title: "requests", num: true, cell: value("requests_in_flight") },
        { title: "turns waiting", num: true, cell: value("turns_waiting") }, { title: "failovers", num: true, cell: counter("failovers") },
        { title: "duplicates", num: true, cell: counter("duplicates") }, { title: "loop delay", num: true, cell: value("event_loop_lag_s", span) },
      ], of("rollout"), { empty: "no rollout server is running", caption: "rollout servers" })),
      panel("Search", table([
        { title: "seen by", cell: (p) => p.id }, { title: "healthy", num: true, cell: (p) => `${number(p.values.retrievers_healthy ?? null)} of ${number(p.values.retrievers ?? null)}` },
        { title: "searches", num: true, cell: counter("searches") }, { title: "failed", num: true, cell: counter("search_errors") },
        { title: "retries", num: true, cell: counter("search_retries") }, { title: "mean time", num: true, cell: value("search_seconds_mean", span) },
        { title: "window", num: true, cell: value("search_window", short) }, { title: "in flight", num: true, cell: value("searches_in_flight") },
        { title: "queued", num: true, cell: value("searches_queued") }, { title: "breaker", cell: (p) => breaker(p.values.search_breaker) },
      ], of("rollout"), { empty: "no rollout server reports", caption: "search" })),
      replicas.length ? panel("Retrievers", table([
        { title: "retriever", cell: (r) => r.url }, { title: "state", cell: (r) => (r.error ? badge("no answer", "bad") : badge("serves", "good")) },
        { title: "backend", cell: (r) => r.info.type ?? r.info.backend ?? "–" }, { title: "passages", num: true, cell: (r) => number(r.info.passages ?? null) },
        { title: "passages per query", num: true, cell: (r) => number(r.info.topk ?? null) }, { title: "answered in", num: true, cell: (r) => span(r.seconds) },
        { title: "detail", cell: (r) => r.error || (r.info.fingerprint ? `index ${r.info.fingerprint.slice(0, 12)}` : "") },
      ], replicas, { caption: "retrievers" })) : null,
      panel("Streams", h("dl", { class: "facts" }, Object.entries({
        "tasks waiting": seen.streams.tasks_waiting, "tasks leased": seen.streams.tasks_leased, "groups ready": seen.streams.traj_ready,
        "groups until the next checkpoint": seen.streams.traj_unacked, "Redis memory": `${number(seen.redis.memory / 2 ** 20, 1)} MiB${seen.redis.max_memory ? ` of ${number(seen.redis.max_memory / 2 ** 20)}` : ""}`,
      }).map(([name, v]) => [h("dt", {}, name), h("dd", {}, typeof v === "number" ? number(v) : v)]))));
  }
  await refresh();
  return { refresh };
}

function breaker(value) {
  if (value === undefined) return "–";
  return value === 0 ? badge("closed", "good") : badge(value === 1 ? "open" : "half open", "bad");
}
