// Requests to the dashboard's server, and its events. The token lives in this tab's session storage only.

const KEY = "foray-token";
let asking = null;

export class Refused extends Error {}

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// `ask` shows a form and resolves with a token.
export function onToken(ask) {
  asking = ask;
}

async function request(path, more = {}, rest = {}) {
  for (;;) {
    const answer = await fetch(path, { headers: { ...headers(), ...more }, cache: "no-store", ...rest });
    if ((answer.status === 401 || answer.status === 403) && asking) {
      const said = await answer.json().catch(() => ({}));
      sessionStorage.setItem(KEY, await asking(said.error || "this run needs a token"));
      continue;
    }
    return answer;
  }
}

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const search = new URLSearchParams(given).toString();
  return read(await request(search ? `${path}?${search}` : path));
}

export async function post(path) {
  return read(await request(path, { "Content-Type": "application/json" }, { method: "POST", body: "{}" }));
}

async function read(answer) {
  const body = await answer.json();
  if (!answer.ok) throw new Refused([body.error, body.why, body.todo].filter(Boolean).join("; "));
  return body;
}

export async function download(path, name) {
  const answer = await request(path);
  if (!answer.ok) throw new Refused(`the export failed: ${answer.status}`);
  const url = URL.createObjectURL(await answer.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// Read server-sent events until the server ends them: fetch, not EventSource, because that cannot send a token.
async function* sent(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await Promise.race([reader.read(), silence(40_000)]);
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").filter((l) => !l.startsWith(":")).map((l) => {
        const at = l.indexOf(": ");
        return [l.slice(0, at), l.slice(at + 2)];
      }));
      if (fields.data === "[DONE]") return;
      if (fields.data) yield { id: fields.id, kind: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

// Read `path` to its end; `signal` leaves earlier. With a `body`, post it.
export async function follow(path, onEvent, signal, body) {
  const posted = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const answer = await request(path, body === undefined ? {} : { "Content-Type": "application/json" }, { signal, ...posted });
  if (!answer.ok) await read(answer);
  for await (const event of sent(answer)) onEvent(event.kind, event.data);
}

// Read /events for ever.
export async function listen(onEvent, onState) {
  let last = "";
  let pause = 1000;
  for (;;) {
    try {
      const answer = await request("/events", last ? { "Last-Event-ID": last } : {});
      if (!answer.ok) throw new Error(`${answer.status}`);
      onState(true);
      pause = 1000;
      for await (const event of sent(answer)) {
        if (event.id) last = event.id;
        onEvent(event.kind, event.data);
      }
    } catch {
      // the server is away: try again below
    }
    onState(false);
    await new Promise((wake) => setTimeout(wake, pause));
    pause = Math.min(15_000, pause * 1.7);
  }
}

function silence(ms) {
  return new Promise((_, fail) => setTimeout(() => fail(new Error("no heartbeat")), ms));
}
