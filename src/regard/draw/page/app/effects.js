// What the model says without a head: the probabilities of the next token, or how far the sentence's vector turns.

const effectsOf = (run) => run.effects;
const effectOf = (run, layer, head) => (run.effects && run.effects.heads[`${layer}.${head}`]) || null;

const changeText = (kind, change) =>
  kind === "next"
    ? `the prediction changes by ${number(change, 2)} nats`
    : `the sentence vector turns by ${number((180 / Math.PI) * Math.acos(clamp(1 - change, -1, 1)), 2)}° (1 − cosine: ${number(change, 2)})`;

// Tokens with their probabilities, in a line.
function nextTokens(top, count) {
  return top
    .slice(0, count)
    .flatMap(([token, p], i) => [
      i ? ", " : null,
      element("b", { class: "token" }, isolated(short(visible(token), 16))),
      ` ${asPercent(p)}`,
    ]);
}

const asPercent = (p) => `${p >= 0.0995 ? (100 * p).toFixed(0) : (100 * p).toFixed(1)}%`;
// White space that can be seen.
const visible = (token) => token.trim() || token.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "␣";

// One line: what happens without a head. Null if it was not computed.
function effectLine(app, layer, head) {
  const effect = effectOf(app.run, layer, head);
  if (!effect) return null;
  const { kind, intact } = effectsOf(app.run);
  if (kind !== "next") return [`Without it ${changeText(kind, effect.change)}.`];
  const [token, before] = intact.top[0];
  const found = effect.top.find(([other]) => other === token);
  const after = found ? asPercent(found[1]) : `less than ${asPercent(effect.top[effect.top.length - 1][1])}`;
  return [
    "Without it, the next token ",
    element("b", { class: "token" }, isolated(visible(token))),
    `: ${asPercent(before)} → ${after}.`,
  ];
}

// The same as a table with bars; on a live page a head that was not computed can be.
function effectPanel(app, layer, head) {
  const all = effectsOf(app.run);
  if (!all && !(app.live && app.live.record)) return null;
  const effect = effectOf(app.run, layer, head);
  const title = element("h3", {}, `Without head ${layer}.${head}`);
  if (!effect) {
    const ask = app.live
      ? element(
          "button",
          { type: "button", id: "ask-without", onclick: () => app.live.without(layer, head) },
          "Run the model without this head",
        )
      : element(
          "p",
          { class: "note" },
          "In this file it is computed for the heads of the story only. `regard serve` shows this page live, and computes it for any head.",
        );
    return element("section", { class: "effects" }, title, ask);
  }
  const change = element(
    "p",
    { id: "change", "data-change": effect.change },
    `${changeText(all.kind, effect.change)}.`,
  );
  return element(
    "section",
    { class: "effects" },
    title,
    change,
    all.kind === "next" ? probabilityTable(all.intact, effect) : null,
  );
}

function probabilityTable(intact, effect) {
  const tokens = [...new Set([...intact.top, ...effect.top].map(([token]) => token))];
  const of = (run, token) => (run.top.find(([other]) => other === token) || [token, null])[1];
  const bar = (p) =>
    element(
      "td",
      {},
      p === null
        ? "–"
        : [
            shape(
              "svg",
              { width: 64, height: 10, "aria-hidden": "true" },
              shape("rect", { width: Math.max(1, 64 * p), height: 10, fill: "var(--line)" }),
            ),
            ` ${asPercent(p)}`,
          ],
    );
  const rows = tokens.map((token) =>
    element(
      "tr",
      {},
      element("th", { scope: "row", dir: "auto" }, isolated(short(visible(token), 20))),
      bar(of(intact, token)),
      bar(of(effect, token)),
    ),
  );
  return element(
    "table",
    { class: "plain", id: "next-tokens" },
    element("caption", {}, "The next token"),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        ["", "with it", "without it"].map((name) => element("th", { scope: "col" }, name)),
      ),
    ),
    element("tbody", {}, rows),
  );
}
