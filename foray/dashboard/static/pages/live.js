// Groups in flight, and one trajectory while it is generated.

import { follow, get } from "../api.js";
import { badge, fill, h, number, panel, span, table } from "../dom.js";

const EVERY_MS = 2000;

export async function show(box, where, context) {
  const watched = h("div", {});
  const list = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Live"), watched, list);
  let leave = null;
  let at = "";

  async function refresh() {
    draw(context.overview.is_over ? [] : (await get("/api/live")).servers); // its servers have ended
  }
  function draw(servers) {
    const groups = servers.flatMap((server, number_) => server.groups.map((group) => ({ ...group, server: number_ })));
    const silent = servers.filter((server) => server.error);
    fill(list, silent.length ? panel("No answer", h("ul", { class: "plain" }, silent.map((s) => h("li", {}, s.url, ": ", s.error)))) : null,
      panel("Groups in flight", h("p", { class: "dim" }, `rollout servers: ${number(servers.length)}, groups: ${number(groups.length)}. Open a trajectory to read it while it is generated.`),
        table([
          { title: "seq", num: true, cell: (g) => number(g.seq) }, { title: "question", cell: (g) => g.question }, { title: "for", num: true, cell: (g) => span(g.seconds) },
          { title: "trajectories", cell: (g) => h("span", { class: "chips" }, g.trajectories.map((t) => chip(g, t))) },
        ], groups, { empty: context.overview.is_over ? "the run is over" : "no group is in flight", caption: "groups in flight" })));
  }
  function chip(group, t) {
    const path = `${group.server}/${group.seq}/${t.index}`;
    const state = t.state === "ended" ? t.status ?? "ended" : t.state;
    return h("a", { class: `chip ${t.state === "ended" ? "dimmed" : ""}`, href: `#/live/${path}`, "aria-current": path === at ? "true" : undefined,
      title: t.last_query ? `last search: ${t.last_query}` : undefined }, `${t.index + 1}: ${state}, ${number(t.tokens)} tokens`);
  }

  function watch(rest) {
    leave?.abort();
    leave = null;
    at = rest.join("/");
    fill(watched);
    if (rest.length !== 3) return;
    leave = new AbortController();
    const segments = [];
    const state = h("p", { class: "dim", role: "status" }, "waiting for the server");
    const body = h("div", { class: "conversation" });
    const title = h("h2", {}, `seq ${rest[1]}, trajectory ${Number(rest[2]) + 1}`);
    fill(watched, h("section", { class: "panel" }, title, state, body));
    const mine = leave;
    follow(`/api/live/${rest.map(encodeURIComponent).join("/")}`, (kind, data) => {
      if (mine !== leave) return;
      if (kind === "start") fill(title, data.question), fill(state, badge("live", "good"), ` seq ${data.seq}, attempt ${data.attempt}, trajectory ${data.index + 1}`);
      else if (kind === "segment") grow(segments, body, data);
      else if (kind === "gone") fill(state, badge("ended", "plain"), ` ${data}; `, later(rest));
      else if (kind === "end") fill(state, badge(data.status ?? "released", data.status ? "plain" : "bad"), ended(data),
        data.status ? later(rest) : " another attempt begins again");
    }, mine.signal).catch((error) => mine === leave && fill(state, error.message));
  }

  const timer = setInterval(() => refresh().catch(() => {}), EVERY_MS);
  await refresh();
  watch(where.rest);
  return {
    move(next) {
      watch(next.rest);
      refresh().catch(() => {});
      return true;
    },
    key(key) {
      if (key !== "Escape" || !at) return false;
      context.go("#/live");
      return true;
    },
    destroy() {
      clearInterval(timer);
      leave?.abort();
    },
  };
}

function ended(data) {
  return ` ${data.cause ? `${data.cause}; ` : ""}answer ${JSON.stringify(data.answer)}, reward ${number(data.reward, 2)}; `;
}

function later([, seq, place]) {
  return h("a", { href: `#/group/${seq}/${place}` }, "the group, once it is trained");
}

// A segment's text is kept as one text node, which grows.
function grow(segments, body, data) {
  let one = segments[data.segment];
  if (!one) {
    one = segments[data.segment] = { meta: h("div", { class: "meta" }), text: document.createTextNode("") };
    const kind = data.owner;
    body.append(h("div", { class: `segment ${kind}` }, one.meta, h("div", { class: `part ${kind}` }, h("span", { class: "kind" }, kind), h("div", { class: "text" }, one.text))));
  }
  if (data.append) one.text.appendData(data.text);
  else one.text.data = data.text;
  const facts = [data.version && `version ${data.version}`, data.engine, data.query && `“${data.query}”`, data.error, `${number(data.tokens)} tokens`, data.complete ? data.finish_reason : "…"];
  fill(one.meta, facts.filter(Boolean).join(" · "));
}
