// One group: its question, its way to training, its trajectories side by side, and one of them with its tokens.

import { download, get } from "../api.js";
import { badge, fill, h, marked, number, panel, short, span } from "../dom.js";

const BADGES = { think: "think", search: "search", information: "information", answer: "answer", tool: "tool", text: "text", prompt: "prompt", environment: "environment" };

export async function show(box, where, context) {
  const seq = where.rest[0];
  const epoch = where.query.epoch;
  const group = await get(`/api/groups/${encodeURIComponent(seq)}`, { epoch });
  const count = group.trajectories.length;
  const gold = group.question.answers;
  let place = where.rest[1] === undefined ? null : Number(where.rest[1]);
  let tokens = false;
  const body = h("div", {});
  const chips = h("div", { class: "chips", role: "group", "aria-label": "trajectories of the group" });
  const at = (n) => `#/group/${seq}${n === null ? "" : `/${n}`}${epoch ? `?epoch=${epoch}` : ""}`;

  fill(box, h("div", { class: "question" },
    h("p", { class: "crumbs" }, h("a", { href: context.list }, "trajectories"), ` / seq ${group.seq} · step ${group.step} · `, group.question.id,
      group.rolled_back ? badge("rolled back by a crash", "bad") : null,
      [["previous", "← previous group"], ["next", "next group →"]].map(([to, text]) => (group[to] ? [" · ", h("a", { href: `#/group/${group[to]}` }, text)] : null))),
    h("h1", {}, group.question.text), h("p", {}, h("span", { class: "dim" }, "gold: "), gold.length ? gold.join(" | ") : "none given")), chips, body);

  function draw() {
    fill(chips, h("a", { class: "chip", href: at(null), "aria-current": place === null ? "true" : undefined }, "side by side"),
      group.trajectories.map((t, i) => h("a", { class: `chip ${tone(t)}`, href: at(i), "aria-current": place === i ? "true" : undefined }, `${i + 1}: ${short(t.reward)}`)));
    if (place === null) fill(body, h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "trajectories side by side" },
      group.trajectories.map((t, i) => h("article", { class: "column" }, facts(t, i), conversation(t, gold, true)))), life());
    else fill(body, h("div", { class: "line" }, facts(group.trajectories[place], place),
      h("button", { onclick: toggle, "aria-pressed": tokens ? "true" : "false" }, tokens ? "conversation (t)" : "tokens (t)"),
      h("button", { onclick: save }, "save as HTML")), tokens ? h("p", { class: "dim" }, "loading") : conversation(group.trajectories[place], gold, false), life());
    if (place !== null && tokens) showTokens();
  }
  function tone(t) {
    if (!t.valid) return "dimmed";
    return t.reward > group.reward_mean ? "good" : t.reward < group.reward_mean ? "bad" : "";
  }
  function facts(t, i) {
    return h("div", { class: "facts-line" }, h("h2", {}, place === null ? h("a", { href: at(i) }, `trajectory ${i + 1}`) : `trajectory ${i + 1} of ${count}`),
      badge(`reward ${short(t.reward)}`, tone(t)), t.reward_minus_mean ? badge(`${t.reward_minus_mean > 0 ? "+" : ""}${short(t.reward_minus_mean)} to the group's mean`) : null,
      badge(t.status, t.valid ? "plain" : "bad"), t.cause ? badge(t.cause, "bad") : null,
      h("span", { class: "dim" }, `${t.turns} turns, ${t.searches} searches, ${number(t.sampled)} of ${number(t.tokens)} tokens sampled, ${span(t.seconds)}`),
      Object.keys(t.rewards).length ? h("span", { class: "dim" }, Object.entries(t.rewards).map(([n, v]) => `${n} ${short(v)}`).join(", ")) : null,
      h("div", {}, h("span", { class: "dim" }, "answer: "), t.answer || "none"));
  }
  function life() {
    const others = group.asked.filter((a) => a.seq !== group.seq || a.epoch !== group.epoch);
    return h("div", { class: "two" }, panel("From issue to training", h("ol", { class: "life" }, group.life.map((l) => h("li", {}, h("strong", {}, l.what), " ", l.text)))),
      panel("The same question at other steps", others.length ? h("ul", { class: "plain" }, others.map((a) => h("li", {}, h("a", { href: `#/group/${a.seq}?epoch=${a.epoch}` }, `step ${a.step}`), ` mean reward ${short(a.reward)}`)))
        : h("p", { class: "dim" }, "it was asked once")));
  }
  async function showTokens() {
    const mine = place;
    const found = await get(`/api/groups/${group.seq}/${place}/tokens`, { epoch: group.epoch });
    if (mine !== place || !tokens) return;
    body.children[1].replaceWith(strip(found.segments));
  }
  function toggle() {
    tokens = !tokens;
    draw();
  }
  function save() {
    download(`/export/groups/${group.seq}${place === null ? "" : `/${place}`}?epoch=${group.epoch}`, `seq-${group.seq}${place === null ? "" : `-${place + 1}`}.html`);
  }
  draw();
  return {
    move(next) {
      if (next.rest[0] !== seq || next.query.epoch !== epoch) return false;
      place = next.rest[1] === undefined ? null : Number(next.rest[1]);
      draw();
      return true;
    },
    key(key) {
      const step = { j: 1, k: -1 }[key];
      if (step) {
        const next = place === null ? (step > 0 ? 0 : count - 1) : place + step;
        history.replaceState(null, "", at(Math.max(0, Math.min(count - 1, next))));
        dispatchEvent(new HashChangeEvent("hashchange"));
      } else if (key === "t" && place !== null) toggle();
      else return false;
      return true;
    },
  };
}

function conversation(t, gold, compact) {
  return h("div", { class: "conversation" }, t.segments.map((s) => {
    if (s.owner === "prompt" && compact) return null;
    if (s.owner === "prompt") return h("details", { class: "part prompt" }, h("summary", {}, "prompt", h("span", { class: "dim" }, ` ${s.tokens} tokens, not trained on`)), h("div", { class: "text" }, s.text));
    const masked = Object.entries(s.not_trained).map(([why, n]) => `${n} tokens not trained on: ${why}`).join("; ");
    const label = s.owner === "policy"
      ? `version ${s.versions.map((v) => v[0]).join(", ")}${s.engine ? ` · ${s.engine}` : ""} · ${s.tokens} tokens${s.finish_reason ? ` · ${s.finish_reason}` : ""}`
      : `${s.tool ? `${s.tool}: ` : ""}${s.query ? `“${s.query}” · ` : ""}${s.tokens} tokens, not trained on · ${number(1000 * s.latency_s)} ms`;
    return h("div", { class: `segment ${s.owner} ${masked ? "masked" : ""}` }, compact ? null : h("div", { class: "meta" }, label, s.reward ? ` · reward ${short(s.reward)}` : ""),
      s.error ? h("div", { class: "part error" }, h("span", { class: "kind" }, "error"), s.error) : null, masked ? h("div", { class: "meta" }, masked) : null,
      s.parts.map((p) => h("div", { class: `part ${p.kind}` }, h("span", { class: "kind" }, BADGES[p.kind] || p.kind), content(p, gold, compact))));
  }));
}

function content(part, gold, compact) {
  if (part.passages?.length) return part.passages.map((p) => h("details", { class: "passage", open: !compact }, h("summary", {}, marked(p.title || p.id, gold), h("span", { class: "dim" }, ` ${p.id}`)), h("div", { class: "text" }, marked(p.text, gold))));
  const mark = part.kind === "answer" || part.kind === "information";
  return h("div", { class: "text" }, mark ? marked(part.text.trim(), gold) : part.text.trim());
}

// Tokens are coloured by the probability with which the engine sampled them; the line below tells the one in focus.
function strip(segments) {
  const detail = h("p", { class: "detail", role: "status" }, "Point at a token, or move through them with Tab.");
  const computed = segments.some((s) => s.learner.logprob);
  const box = h("div", {}, computed ? null : h("p", { class: "dim" }, "What the learner computed for these tokens was not kept: it keeps some steps (learner.token_values)."), h("p", { class: "legend" }, "probability when sampled: ", [5, 4, 3, 2, 1].map((n) => h("span", { class: `token p${n}` }, LEVELS[n]))), detail);
  for (const s of segments) {
    const line = h("div", { class: `tokens ${s.owner}` }, h("span", { class: "kind" }, s.owner));
    s.ids.forEach((id, i) => {
      const text = s.texts.length ? s.texts[i] : String(id);
      const cover = s.spans.find((v) => v.start <= i && i < v.end);
      const p = s.owner === "policy" ? Math.exp(s.logprobs[i]) : null;
      const learner = (name) => s.learner[name]?.[i] ?? null;
      const trained = learner("logprob") === null ? "" : `; when trained: log-prob ${learner("logprob").toFixed(4)}, ratio ${Math.exp(learner("logprob") - s.logprobs[i]).toFixed(4)}, `
        + `${learner("reference") === null ? "" : `reference ${learner("reference").toFixed(4)}, `}advantage ${short(learner("advantage"))}`;
      const say = () => fill(detail, h("code", {}, JSON.stringify(text)), ` id ${id}, token ${i} of the segment`,
        p === null ? ", not sampled by the policy, not trained on" : `, log-prob ${s.logprobs[i].toFixed(4)} (probability ${p.toFixed(4)}), version ${cover?.version}, lag ${cover?.lag}${trained}`,
        cover?.not_trained ? `, not trained on: ${cover.not_trained}` : "");
      line.append(h("span", { class: `token ${p === null ? "" : `p${level(p)}`} ${cover?.not_trained ? "masked" : ""}`, tabindex: p === null ? undefined : "0", onmouseenter: say, onfocus: say }, text.replaceAll("\n", "⏎\n") || "·"), h("wbr"));
    });
    box.append(line);
  }
  return box;
}

const LEVELS = { 5: "> 0.9", 4: "> 0.5", 3: "> 0.2", 2: "> 0.05", 1: "less" };

function level(p) {
  return p > 0.9 ? 5 : p > 0.5 ? 4 : p > 0.2 ? 3 : p > 0.05 ? 2 : 1;
}
