// Questions to a served policy: thoughts, searches with their passages, answers; two models side by side.

import { follow, get } from "../api.js";
import { badge, fill, h, number, panel, span } from "../dom.js";

// the conversation stays while other pages are shown
const log = h("section", { class: "chat-log", role: "log", "aria-label": "conversation", tabindex: "0" });
const histories = new Map();
const chosen = { model: "", other: "", search: true };
const NO_SERVER = "This dashboard has no served policy. Start it as `foray dashboard RUN --chat`, which serves the policy of this run, or with the URL of a running `foray serve` after --chat and its token in FORAY_SERVE_TOKEN.";

export async function show(box, where, context) {
  const [{ servers }, examples] = await Promise.all([get("/api/chat/models"), get("/api/trajectories", { limit: 20 }).catch(() => ({ rows: [] }))]);
  const models = servers.flatMap((server, place) => server.data.map((card) => ({
    key: `${place} ${card.id}`, server: place, id: card.id, url: server.url, loop: Boolean(card.foray?.loop), version: card.foray?.version ?? null })))
    .sort((a, b) => b.loop - a.loop);
  const silent = servers.filter((server) => server.error);
  const many = servers.length > 1;
  const named = (model) => `${model.id}${many ? ` at ${model.url.replace(/^\w+:\/\//, "")}` : ""}${model.loop ? "" : " (no searches)"}`;
  let leave = null;

  const model = h("select", { id: "chat-model", onchange: () => { chosen.model = model.value; } }, models.map((m) => h("option", { value: m.key }, named(m))));
  const other = h("select", { id: "chat-other", onchange: () => { chosen.other = other.value; } }, h("option", { value: "" }, "nothing"), models.map((m) => h("option", { value: m.key }, named(m))));
  const search = h("input", { type: "checkbox", id: "chat-search", checked: chosen.search, onchange: () => { chosen.search = search.checked; } });
  if (models.some((m) => m.key === chosen.model)) model.value = chosen.model;
  if (models.some((m) => m.key === chosen.other)) other.value = chosen.other;
  const field = h("textarea", { id: "chat-question", rows: "2", required: true, placeholder: "Ask a question", onkeydown: typed });
  const send = h("button", { type: "submit", class: "send" }, "Ask");
  const stop = h("button", { type: "button", onclick: () => leave?.abort(), hidden: true }, "Stop");
  const state = h("p", { class: "dim", role: "status" });
  const form = h("form", { class: "chat-form", onsubmit: (event) => { event.preventDefault(); ask(field.value.trim()); } },
    h("label", { for: "chat-question", class: "hidden" }, "Question"), field, h("div", { class: "chat-buttons" }, send, stop), state);
  const questions = [...new Set(examples.rows.map((row) => row.question))].slice(0, 3);
  const hints = h("div", { class: "chips", role: "group", "aria-label": "examples of this run" },
    questions.map((text) => h("button", { type: "button", class: "chip", onclick: () => ask(text) }, text)));

  fill(box, h("h1", { class: "hidden" }, "Chat"),
    silent.length ? panel("No answer", h("ul", { class: "plain" }, silent.map((s) => h("li", {}, s.url, ": ", s.error)))) : null,
    models.length ? [h("div", { class: "filters chat-choice" }, h("label", { for: "chat-model" }, "model", model), h("label", { for: "chat-other" }, "compare with", other),
      h("label", { class: "check", for: "chat-search" }, h("span", {}, search, " search"))), log, questions.length && !log.children.length ? hints : null,
    context.overview.operator ? form : panel("Asking needs the role operator", h("p", {}, "Answers use an engine. Open this page with the operator's token."))]
      : silent.length ? null : panel("Nothing to ask", h("p", {}, NO_SERVER)));

  function typed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape" && leave) {
      event.stopPropagation();
      leave.abort();
    }
  }

  async function ask(question) {
    if (leave || !question) return;
    hints.remove();
    leave = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    field.value = "";
    fill(state, "answering");
    const asked = [model.value, other.value].filter((key, place) => key && (place === 0 || key !== model.value)).map((key) => models.find((m) => m.key === key));
    const row = h("div", { class: asked.length > 1 ? "columns" : "" });
    log.append(h("h2", { class: "asked" }, question), row);
    const answers = asked.map((m) => answer(m, question, row, leave.signal));
    toEnd();
    const ends = await Promise.all(answers);
    leave = null;
    send.disabled = false;
    stop.hidden = true;
    fill(state, ends.join("; "));
    field.focus();
  }

  async function answer(m, question, row, signal) {
    const facts = h("div", { class: "meta" }, named(m));
    const body = h("div", { class: "conversation" });
    row.append(h("article", { class: row.className ? "column" : "", "aria-label": `answer of ${m.id}`, "aria-busy": "true" }, facts, body));
    const before = m.loop ? [] : histories.get(m.key) ?? [];
    const messages = [...before, { role: "user", content: question }];
    const began = performance.now();
    const said = { content: "", searches: 0, end: null, reason: null };
    let part = null;
    const write = (kind, name, text) => {
      if (part?.kind !== kind) {
        const first = text.trimStart();
        if (!first) return;
        part = { kind, text: document.createTextNode(first) };
        body.append(h("div", { class: `part ${kind}` }, h("span", { class: "kind" }, name), h("div", { class: "text" }, part.text)));
      } else part.text.appendData(text);
    };
    const found = (one) => {
      part = null;
      said.searches += 1;
      body.append(searched(one));
    };
    let problem = "";
    try {
      await follow("/api/chat", (_, chunk) => {
        if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
        const near = atEnd();
        const choice = chunk.choices?.[0];
        for (const one of chunk.foray?.searches?.slice(choice?.finish_reason ? said.searches : 0) ?? []) found(one);
        if (choice?.delta?.reasoning_content) write("think", "thoughts", choice.delta.reasoning_content);
        if (choice?.delta?.content) {
          said.content += choice.delta.content;
          write("answer", "answer", choice.delta.content);
        }
        if (choice?.finish_reason) Object.assign(said, { end: chunk.foray ?? {}, reason: choice.finish_reason });
        if (near) toEnd();
      }, signal, { server: m.server, model: m.id, messages, search: search.checked });
      if (!said.end) problem = "the connection ended before the answer was complete";
      else if (!said.content.trim()) problem = `no answer: ${said.end.cause || said.reason}`;
    } catch (error) {
      problem = signal.aborted ? "stopped" : error.message;
    }
    const near = atEnd();
    if (problem) body.append(h("div", { class: "part error" }, problem));
    else if (!m.loop) histories.set(m.key, [...messages, { role: "assistant", content: said.content }]);
    const seconds = (performance.now() - began) / 1000;
    const version = said.end?.version ?? null;
    fill(facts, [named(m), version !== null && `version ${version}`, m.loop && `${number(said.searches)} search${said.searches === 1 ? "" : "es"}`, span(seconds)].filter(Boolean).join(" · "));
    body.parentElement.removeAttribute("aria-busy");
    if (near) toEnd();
    return `${m.id}: ${problem || "answered"}`;
  }

  return {
    shown: () => (models.length ? field.focus({ preventScroll: true }) : null),
    key(key) {
      if (key !== "Escape" || !leave) return false;
      leave.abort();
      return true;
    },
    destroy: () => leave?.abort(),
  };
}

// What is new is scrolled into view, unless somebody reads further up.
function atEnd() {
  return innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
}

function toEnd() {
  scrollTo(0, document.documentElement.scrollHeight);
}

// A search folds its passages.
function searched(one) {
  const passages = one.passages ?? [];
  return h("details", { class: "part search" }, h("summary", {}, h("span", { class: "kind" }, "search"), ` ${one.query ?? ""} `,
    badge(one.error ? "failed" : `${number(passages.length)} passage${passages.length === 1 ? "" : "s"}`, one.error ? "bad" : "plain")),
  one.error ? h("p", {}, one.error) : null,
  passages.map((p) => h("div", { class: "passage" }, h("strong", {}, p.title || "passage"), p.score === null || p.score === undefined ? null : h("span", { class: "dim" }, ` ${number(p.score, 2)}`), h("div", { class: "text" }, p.text))));
}
