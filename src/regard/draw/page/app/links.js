// Two columns of tokens with lines between: thickness is weight. Hover a token: what it looks at, what looks at it.

const LINE = 19; // pixels to a token
const MOST = 160; // tokens in a column; of longer texts the part that the map shows

class LinksView {
  constructor({ onpick = null } = {}) {
    this.onpick = onpick;
    this.lines = shape("svg", { class: "lines", "aria-hidden": "true" });
    this.left = element("ol", { class: "queries", "aria-label": "queries: who looks" });
    this.right = element("ol", { class: "keys", "aria-label": "keys: who is looked at" });
    this.columns = element("div", { class: "columns" }, this.left, this.lines, this.right);
    this.note = element("p", { class: "note" });
    this.node = element("div", { class: "links" }, this.columns, this.note);
    new ResizeObserver(() => this.draw()).observe(this.lines);
  }

  // picture: what to take weights from; window: the part of it that is shown, in units.
  show(picture, { threshold, top, chosen = -1, window }) {
    Object.assign(this, { picture, threshold, top, chosen });
    const { layer } = picture;
    const pooled = layer.pooled;
    this.rows = pooled
      ? tokensIn(window[0], window[1], picture.rows, layer.queries, layer.n)
      : unitsIn(window[0], window[1], picture.rows, layer.queries);
    this.cols = pooled
      ? tokensIn(window[2], window[3], picture.cols, layer.keys, layer.m)
      : unitsIn(window[2], window[3], picture.cols, layer.keys);
    this.place = new Map(this.cols.map(([j], at) => [j, at]));
    this.held = null;
    const cut = [this.rows, this.cols].some((part) => part.cut);
    const first = cut ? `, its first ${MOST} tokens` : "";
    if (pooled)
      this.note.textContent = `${keptLinks(layer)}, of the part that the map shows${first}. Zoom in to see others.`;
    else this.note.textContent = cut ? `The first ${MOST} tokens of the part that the map shows.` : "";
    this.links = this.found();
    refill(
      this.left,
      this.rows.map((row, at) => this.token(row, at, "query")),
    );
    refill(
      this.right,
      this.cols.map((col, at) => this.token(col, at, "key")),
    );
    this.draw();
  }

  token([unit, label, special], at, side) {
    const name = `${short(label, 40)}, ${side === "query" ? "looks" : "is looked at"}`;
    const hold = (on) => () => this.hold(on ? [side, at] : null);
    const chosen = side === "query" && unit === this.chosen;
    return element(
      "li",
      {},
      element(
        "button",
        {
          type: "button",
          id: `${side}-${unit}`,
          class: special ? "special" : "",
          title: short(label, 200),
          "aria-label": name,
          dir: "auto",
          "aria-pressed": side === "query" ? String(chosen) : null,
          onpointerenter: hold(true),
          onpointerleave: hold(false),
          onfocus: hold(true),
          onblur: hold(false),
          onclick: () => side === "query" && this.onpick && this.onpick(chosen ? -1 : unit),
        },
        short(label, 24),
      ),
      element("span", { class: "weight" }),
    );
  }

  // [row, column, weight], of all queries that are shown: above the threshold, at most `top` of each.
  found() {
    const { picture, threshold, top } = this;
    const { layer, head } = picture;
    const links = [];
    this.rows.forEach(([unit], at) => {
      const strongest = layer.pooled
        ? layer.strongest(head, unit, top)
        : range(picture.cols.length)
            .map((j) => [j, picture.value(unit, j)])
            .sort((a, b) => b[1] - a[1])
            .slice(0, top);
      for (const [j, weight] of strongest)
        if (weight > 0 && weight >= threshold && this.place.has(j)) links.push([at, this.place.get(j), weight]);
    });
    return links;
  }

  hold(held) {
    this.held = held;
    this.draw();
  }

  // The chosen query, if it is among those that are shown.
  choice() {
    const at = this.chosen < 0 ? -1 : this.rows.findIndex(([unit]) => unit === this.chosen);
    return at < 0 ? null : ["query", at];
  }

  draw() {
    if (!this.links) return;
    const width = this.lines.clientWidth || 120;
    const height = LINE * Math.max(this.rows.length, this.cols.length, 1);
    this.lines.setAttribute("height", height);
    this.lines.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const held = this.held || this.choice();
    const chosen = ([i, j]) => !held || (held[0] === "query" ? i === held[1] : j === held[1]);
    const middle = (at) => LINE * (at + 0.5);
    const made = this.links.filter(chosen).map(([i, j, weight]) => {
      const [a, b] = [middle(i), middle(j)];
      return shape("path", {
        d: `M0 ${a}C${width * 0.4} ${a} ${width * 0.6} ${b} ${width} ${b}`,
        fill: "none",
        stroke: "var(--line)",
        "stroke-width": Math.max(0.5, 7 * weight).toFixed(2),
        "stroke-opacity": Math.min(1, 0.18 + weight).toFixed(2),
      });
    });
    fill(this.lines, made);
    const said = { query: new Map(), key: new Map() };
    if (held)
      for (const [i, j, weight] of this.links.filter(chosen)) {
        said.query.set(i, held[0] === "query" ? null : weight);
        said.key.set(j, held[0] === "key" ? null : weight);
      }
    for (const [list, side] of [
      [this.left, "query"],
      [this.right, "key"],
    ]) {
      [...list.children].forEach((item, at) => {
        const weight = said[side].get(at);
        item.lastChild.textContent = weight === undefined || weight === null ? "" : weight.toFixed(2);
        item.classList.toggle("held", Boolean(held) && held[0] === side && held[1] === at);
        item.classList.toggle("linked", said[side].has(at));
      });
    }
    this.columns.classList.toggle("holding", Boolean(held));
  }
}

// Which links of a pooled map the page has, in words.
function keptLinks({ links, n }) {
  if (!links) return "No links are kept of so long a text";
  const [, rows, k] = links.keys.shape;
  const [some, all] = [rows.toLocaleString("en"), n.toLocaleString("en")];
  if (links.queries) return `The strongest link of ${some} of ${all} queries, those with the strongest`;
  return k === 1 ? "The strongest link of each query" : `The ${k} strongest links of each query`;
}

// [unit, label, special] of the units in a window.
function unitsIn(first, last, groups, text) {
  const from = Math.floor(first + 1e-6);
  const to = Math.ceil(last - 1e-6);
  const found = groups
    .slice(from, Math.min(to, from + MOST))
    .map(([token, , label], i) => [from + i, label, text.special.has(token)]);
  found.cut = to - from > MOST;
  return found;
}

function tokensIn(first, last, groups, text, count) {
  const [from, to] = [Math.floor((first * count) / groups.length), Math.ceil((last * count) / groups.length)];
  const found = text.tokens
    .slice(from, Math.min(to, from + MOST))
    .map((token, i) => [from + i, token, text.special.has(from + i)]);
  found.cut = to - from > MOST;
  return found;
}
