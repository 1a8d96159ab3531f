// Where every seq and every token went, and the entries that could not be used.

import { get } from "../api.js";
import { badge, bars, clock, fill, h, number, panel, percent, table } from "../dom.js";

const OUTCOMES = ["trained", "filtered", "stale", "dead", "in_flight"];
const BUCKETS = ["trained", "masked", "filtered", "stale", "failed", "duplicate", "in_flight"];

export async function show(box, _, context) {
  const body = h("div", {});
  fill(box, h("h1", { class: "hidden" }, "Accounting"), body);

  async function refresh() {
    const letters = await get("/api/letters");
    const seen = context.overview;
    const ledger = seen.ledger;
    const rows = (values, names, all) => names.map((n) => [n.replace("_", " "), values[n] ?? 0, `${number(values[n] ?? 0)} (${percent((values[n] ?? 0) / (all || 1))})`]);
    fill(body, h("div", { class: "two" },
      panel("Questions", h("p", {}, `${number(ledger.issued)} issued `, verdict(ledger.closes)), bars(rows(ledger, OUTCOMES, ledger.issued)),
        h("p", { class: "dim" }, seen.conserved ? `counted by the ${seen.conserved}` : "no ledger yet")),
      panel("Tokens", seen.tokens ? [h("p", {}, `${number(seen.tokens.generated)} generated `, verdict(seen.tokens.closes)), bars(rows(seen.tokens.parts, BUCKETS, seen.tokens.generated)),
        h("p", { class: "dim" }, `${number(seen.tokens.rejected)} more in retried attempts`)] : h("p", { class: "dim" }, "not counted yet"))),
    panel("Dead letters", h("p", { class: "dim" }, "entries that could not be used; `foray dlq` shows their bytes and requeues them"), table([
      { title: "seq", num: true, cell: (l) => l.seq || "–" }, { title: "state", cell: (l) => badge(l.fate, l.fate === "dead" ? "bad" : "plain") },
      { title: "reason", cell: (l) => l.reason }, { title: "found by", cell: (l) => l.from }, { title: "when", cell: (l) => clock(l.at) },
      { title: "kept in", cell: (l) => l.kept.join(", ") }, { title: "detail", cell: (l) => l.detail },
    ], [...letters.letters].reverse(), { empty: "no dead letters", caption: "dead letters" })),
    letters.dead.length ? panel("Failed seqs", table([
      { title: "seq", num: true, cell: (d) => d.seq }, { title: "reason", cell: (d) => d.reason }, { title: "state", cell: (d) => d.fate },
    ], letters.dead, { caption: "failed seqs" })) : null);
  }
  await refresh();
  return { refresh };
}

function verdict(closes) {
  return closes ? badge("✓ consistent", "good") : badge("! not consistent", "bad");
}
