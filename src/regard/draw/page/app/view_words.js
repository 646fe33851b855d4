// Words: what every head does with one word, in both directions: what it looks at, and who looks at it.

const HEADS_LISTED = 8; // heads in a list

class WordsView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view words", "aria-label": "Words" });
    this.readout = element("output", { class: "readout", id: "word-readout", "aria-live": "polite" });
    this.panel = element("div", { class: "peek", id: "peek", role: "group", "aria-label": "the head in focus" });
    this.choice = new WordChoice(this);
    this.known = new WeakMap(); // words of long texts
    this.pictures = new Map();
    this.canvases = new Map(); // of strips, to be used again
  }

  get text() {
    const { run, state } = this.app;
    return run.texts[clamp(state.text, 0, run.texts.length - 1)];
  }

  // Whether a layer has a direction: its queries are this text ("to"), or its keys are ("from").
  has(layer, way) {
    const { way: wanted } = this.app.state;
    const side = way === "to" ? layer.queries : layer.keys;
    return Boolean(layer.map) && side === this.text && (wanted === "both" || wanted === way);
  }

  async show() {
    const { app } = this;
    const layers = app.run.layers.filter((layer) => this.has(layer, "to") || this.has(layer, "from"));
    const turn = (this.turn = {}); // (data may arrive after those of a later choice)
    await Promise.all(layers.map((layer) => layer.ready()));
    if (app.view !== this || this.turn !== turn) return;
    const pooled = layers.some((layer) => layer.pooled);
    this.options = {
      words: true,
      specials: Boolean(app.state.specials) || pooled,
      aside: Boolean(app.state.aside),
    };
    this.units = unitsOf(this.text, true, this.options.specials);
    this.at = this.chosen();
    this.cells = layers.map((layer) => range(layer.heads).map((head) => this.cell(layer, head)));
    this.top = this.strongestColour();
    fill(
      this.node,
      this.controls(layers),
      this.choice.show(),
      this.note(layers, pooled),
      layers.length ? this.results(layers) : null,
    );
    this.peek(this.inFocus());
    if (this.moved) this.node.querySelector("[role=radio][tabindex='0']").focus();
    this.moved = false;
  }

  // The number of the chosen word; by default that of the token chosen in other views, or else a long word.
  chosen() {
    const { state, layer } = this.app;
    const token = state.word >= 0 ? state.word : layer.queries === this.text ? state.q : -1;
    const at = this.units.findIndex(([first, last]) => first <= token && token < last);
    return at >= 0 ? at : longestWord(this.units, this.text);
  }

  // What one head does with the word.
  cell(layer, head) {
    const cell = { layer, head, resting: layer.aside(head) || new Set() };
    for (const way of ["to", "from"])
      cell[way] = this.has(layer, way) ? (layer.pooled ? this.keptStrip(cell, way) : this.strip(cell, way)) : null;
    return cell;
  }

  strip({ layer, head }, way) {
    const picture = this.picture(layer, head);
    const own = way === "to" ? picture.rows : picture.cols;
    const [first] = this.units[this.at];
    const at = own.findIndex(([from, to]) => from <= first && first < to);
    const units = way === "to" ? picture.cols : picture.rows;
    const value = way === "to" ? (i) => picture.value(at, i) : (i) => picture.value(i, at);
    const step = way === "to" ? (i) => picture.step(at, i) : (i) => picture.step(i, at);
    const links = range(units.length).map((i) => [i, value(i)]);
    return new WordStrip(units, links, step);
  }

  // Of a long text: the links that the page has, by words. They are not divided by what is left of their query.
  keptStrip({ layer, head, resting }, way) {
    const links = layer.links ? keptLinksOf(layer, head, this.units[this.at], way) : [];
    const counted = this.options.aside ? links.filter(([, key]) => !resting.has(key)) : links;
    return WordStrip.kept(this.wordsOf(layer.keys), this.wordsOf(layer.queries), counted, way);
  }

  // The words of a long text, and the word of each token: once for all heads.
  wordsOf(text) {
    if (!this.known.has(text)) {
      const units = unitsOf(text, true, true);
      this.known.set(text, { units, numbers: unitNumbers(units) });
    }
    return this.known.get(text);
  }

  // The map of a head, in words. All maps of a page that are not pooled are small enough to be kept.
  picture(layer, head) {
    const options = JSON.stringify(this.options);
    if (this.of !== layer.run || this.with !== options) this.pictures.clear();
    Object.assign(this, { of: layer.run, with: options });
    const place = `${layer.index}.${head}`;
    if (!this.pictures.has(place)) this.pictures.set(place, Picture.of(layer, head, this.options));
    return this.pictures.get(place);
  }

  // One scale of colours for all strips.
  strongestColour() {
    const all = this.cells.flat().flatMap(({ to, from }) => [to, from].filter(Boolean));
    return colourTop(
      all.map((strip) => (strip.links.length ? strip.links[0][1] : 0)),
      this.units.length,
    );
  }

  controls(layers) {
    const { app } = this;
    const { state, run } = app;
    const texts = run.texts.map((text, i) => [i, textName(run, text)]);
    const ways = [
      ["both", "both directions"],
      ["to", "what it looks at"],
      ["from", "who looks at it"],
    ];
    return element(
      "div",
      { class: "controls" },
      run.texts.length > 1
        ? field(
            "Text",
            select(texts, run.texts.indexOf(this.text), (value) => state.set({ text: Number(value), word: -1 }), {
              id: "text",
            }),
          )
        : null,
      field(
        "Show",
        select(ways, state.way, (value) => state.set({ way: value }), { id: "way" }),
      ),
      asideCheck(app, layers),
      specialsCheck(app, layers),
      layers.length ? legend(this.top, state.scale) : null,
    );
  }

  choose(at, moved = false) {
    this.moved = moved;
    this.app.state.set({ word: this.units[at][0] });
  }

  note(layers, pooled) {
    const { run } = this.app;
    if (!layers.length)
      return element(
        "p",
        { class: "note", role: "status" },
        run.layers.some((layer) => layer.map)
          ? "No layer has this direction for this text."
          : 'No maps were kept: watch(model, keep="qk") keeps what they need.',
      );
    const heads = layers.reduce((total, layer) => total + layer.heads, 0);
    const parts = [
      `What ${heads} heads do with ${isolated(short(this.units[this.at][2], 24))}, layers down, heads across: ` +
        "→ what it looks at, ← who looks at it.",
    ];
    if (pooled) {
      const kept = keptLinks(layers.find((layer) => layer.pooled));
      parts.push(`${kept}: a strip shows those of this word, at their place in the text.`);
      if (this.options.aside) parts.push("Links onto resting places are left out; the others are as they are.");
    } else if (this.options.aside) parts.push("Weights are shares of what is left beside the resting place.");
    const [first, last] = this.units[this.at];
    if (last - first > 1)
      parts.push(`Of its ${last - first} tokens, weights are averaged as queries, added up as keys.`);
    return element("p", { class: "note", role: "status" }, parts.join(" "));
  }

  results(layers) {
    fill(this.readout, element("span", { class: "note" }, "Point at a strip to read it."));
    delete this.readout.dataset.value;
    return [
      element("div", { class: "line" }, this.readout),
      element(
        "div",
        { class: "beside" },
        element("div", { class: "across", tabindex: 0, role: "region", "aria-label": "heads" }, this.matrix(layers)),
        this.panel,
      ),
      element(
        "div",
        { class: "details" },
        ["to", "from"].map((way) => this.list(way)),
      ),
    ];
  }

  matrix(layers) {
    const wide = Math.max(...layers.map((layer) => layer.heads));
    const top = range(wide).map((head) => element("th", { scope: "col" }, head));
    const rows = layers.map((layer, i) =>
      element(
        "tr",
        {},
        element("th", { scope: "row", title: layer.name }, layer.index, layer.kind === "cross" ? " ×" : ""),
        this.cells[i].map((cell) => element("td", {}, this.link(cell))),
      ),
    );
    const first = element("th", { scope: "col" }, element("span", { class: "unseen" }, "layer"));
    const table = element(
      "table",
      { class: "matrix", "aria-label": "heads: arrow keys move", onkeydown: (event) => this.cellKey(event) },
      element("thead", {}, element("tr", {}, first, top)),
      element("tbody", {}, rows),
    );
    table.style.setProperty("--wide", wide);
    return table;
  }

  link(cell) {
    const { layer, head } = cell;
    const { state } = this.app;
    const [first] = this.units[this.at];
    const way = layer.queries === this.text ? { q: first, k: -1 } : { q: -1, k: -1 };
    const go = state.link({ view: "head", layer: layer.index, head, zoom: "", ...way });
    const name = `${layer.label(head)}: ${this.said(cell).join(", ") || "no link"}`;
    const node = element(
      "a",
      {
        class: "cell",
        id: `cell-${layer.index}.${head}`,
        "data-layer": layer.index,
        "data-head": head,
        href: go.href,
        tabindex: -1,
        title: name,
        "aria-label": name,
        onclick: (event) => (this.fresh ? event.preventDefault() : go.onclick(event)),
        onfocus: () => this.peek(cell),
        onpointerenter: (event) => event.pointerType !== "touch" && this.peek(cell),
        // The first tap shows a head, the second opens it.
        onpointerdown: (event) => (this.fresh = event.pointerType === "touch" && this.peeked !== cell),
      },
      ["to", "from"].map((way) => cell[way] && this.thin(cell, way)),
    );
    const role = layer.role(head);
    if (role) node.style.setProperty("--role", roleColour(role.role));
    return (cell.node = node);
  }

  // A strip, and its strongest link by name.
  thin(cell, way) {
    const strip = cell[way];
    const [unit, value] = strip.links[0] || [-1, 0];
    const canvas = this.canvas(`${cell.layer.index}.${cell.head} ${way}`);
    strip.paint(canvas, this.top, this.app.state.scale);
    canvas.onpointermove = (event) => this.point(cell, way, event);
    Object.assign(canvas.dataset, { way, unit, value, step: unit < 0 ? "" : strip.step(unit) });
    const rests = unit >= 0 && this.rests(cell, way, unit);
    return [
      canvas,
      element(
        "span",
        { class: rests ? "named resting" : "named" },
        element("span", {}, way === "to" ? "→ " : "← ", unit < 0 ? "" : isolated(short(strip.units[unit][2], 16))),
        element("span", { class: "much" }, unit < 0 ? "–" : value.toFixed(2)),
      ),
    ];
  }

  canvas(place) {
    if (!this.canvases.has(place)) this.canvases.set(place, element("canvas", { class: "thin" }));
    return this.canvases.get(place);
  }

  // Whether a link goes to the head's resting place.
  rests({ resting, to }, way, unit) {
    const [first, last] = way === "to" ? to.units[unit] : this.units[this.at];
    return range(last - first).every((i) => resting.has(first + i));
  }

  // The strongest links of a head with the word, in words.
  said(cell) {
    const word = short(this.units[this.at][2], 24);
    return ["to", "from"]
      .filter((way) => cell[way] && cell[way].links.length)
      .map((way) => {
        const [unit, value] = cell[way].links[0];
        const other = short(cell[way].units[unit][2], 24);
        return `${word} ${way === "to" ? "looks at" : "is looked at by"} ${other} ${value.toFixed(2)}`;
      });
  }

  point(cell, way, event) {
    const strip = cell[way];
    const box = event.target.getBoundingClientRect();
    const unit = strip.under((event.clientX - box.left) / box.width);
    const out = this.readout;
    const place = `${cell.layer.index}.${cell.head} `;
    for (const name of ["value", "step", "unit"]) delete out.dataset[name];
    if (unit < 0) return fill(out, place, element("span", { class: "note" }, "no link is kept here"));
    const [value, step] = [strip.value(unit), strip.step(unit)];
    const [own, other] = [this.units[this.at][2], strip.units[unit][2]].map((label) => isolated(short(label, 24)));
    fill(
      out,
      place,
      element("b", {}, way === "to" ? own : other),
      " → ",
      element("b", {}, way === "to" ? other : own),
      ` ${number(value)} `,
      element("small", {}, `± ${number(step, 2)}`),
    );
    Object.assign(out.dataset, { value, step, unit: strip.units[unit].slice(0, 2).join("-") });
  }

  cellKey(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(by, event.key) || !this.peeked) return;
    event.preventDefault();
    event.stopPropagation();
    const row = this.cells.findIndex((cells) => cells.includes(this.peeked));
    const column = this.cells[row].indexOf(this.peeked);
    const [down, right] = by[event.key];
    const next = this.cells[clamp(row + down, 0, this.cells.length - 1)];
    next[clamp(column + right, 0, next.length - 1)].node.focus();
  }

  // The head that was in focus before, else the one with the strongest link.
  inFocus() {
    const all = this.cells.flat();
    const before = this.peeked;
    return (
      (before && all.find(({ layer, head }) => layer === before.layer && head === before.head)) ||
      (this.strongest("to")[0] || this.strongest("from")[0] || {}).cell ||
      all[0]
    );
  }

  // A head in more detail: its map with the word marked, and the word's links.
  peek(cell) {
    if (cell === this.peeked) return;
    if (this.peeked && this.peeked.node) this.peeked.node.setAttribute("tabindex", -1);
    this.peeked = cell;
    if (!cell) return;
    cell.node.setAttribute("tabindex", 0);
    for (const node of this.node.querySelectorAll(".cell.seen")) node.classList.remove("seen");
    cell.node.classList.add("seen");
    const { layer, head } = cell;
    const role = layer.role(head);
    fill(
      this.panel,
      element(
        "h3",
        {},
        badge(role && role.role),
        `${layer.index}.${head} `,
        role ? roleTerm(role.role, "peek-role") : layer.kind === "cross" ? "cross attention" : "no role",
      ),
      element("p", { class: "note" }, role ? role.words : restWords(layer, head)),
      element("div", { class: "both" }, this.smallMap(layer, head), this.links(cell)),
    );
  }

  smallMap(layer, head) {
    const picture = layer.pooled ? Picture.of(layer, head) : this.picture(layer, head);
    const [rows, cols] = [picture.rows.length, picture.cols.length];
    const canvas = painted(picture.values, rows, cols, picture.top, { scale: this.app.state.scale });
    canvas.className = "thumb";
    const frame = { fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" };
    const [first] = this.units[this.at];
    const within = (units) => units.findIndex(([from, to]) => from <= first && first < to);
    const marks = [
      layer.queries === this.text
        ? shape("rect", { ...frame, x: 0, y: within(picture.rows), width: cols, height: 1 })
        : null,
      layer.keys === this.text
        ? shape("rect", { ...frame, x: within(picture.cols), y: 0, width: 1, height: rows })
        : null,
    ];
    const marked = { class: "marks", viewBox: `0 0 ${cols} ${rows}`, preserveAspectRatio: "none" };
    return element("div", { class: "small", "aria-hidden": "true" }, canvas, shape("svg", marked, marks));
  }

  links(cell) {
    const list = (way, name) => {
      if (!cell[way]) return null;
      const items = cell[way].links
        .filter(([, value]) => value >= 0.0005)
        .slice(0, 5)
        .map(([unit, value]) =>
          element("li", {}, `${isolated(short(cell[way].units[unit][2], 18))} `, element("b", {}, value.toFixed(3))),
        );
      return [element("h4", {}, name), element("ol", {}, items.length ? items : element("li", {}, "no link"))];
    };
    return element(
      "div",
      { class: "ways" },
      element("div", {}, list("to", "→ looks at")),
      element("div", {}, list("from", "← is looked at by")),
    );
  }

  // [{cell, unit, value}]: the strongest link of each head between the word and others, beside its resting place.
  strongest(way) {
    return this.cells
      .flat()
      .filter((cell) => cell[way])
      .flatMap((cell) => {
        const own = this.units[this.at][0];
        const self = cell.layer.queries === cell.layer.keys ? own : -1;
        const other = ([unit]) => cell[way].units[unit][0] !== self && !this.rests(cell, way, unit);
        const link = cell[way].links.find(other);
        return link ? [{ cell, unit: link[0], value: link[1] }] : [];
      })
      .sort((a, b) => b.value - a.value)
      .slice(0, HEADS_LISTED);
  }

  list(way) {
    const heads = this.strongest(way);
    if (!heads.length) return null;
    const word = isolated(short(this.units[this.at][2], 24));
    const weight = evenDigits(heads.map(({ value }) => value));
    const rows = heads.map(({ cell: { layer, head, [way]: strip }, unit, value }) => {
      const other = isolated(short(strip.units[unit][2], 18));
      const link = way === "to" ? `${word} → ${other}` : `${other} → ${word}`;
      const role = layer.role(head);
      const place = `${layer.index}.${head}`;
      const go = this.app.state.link({ view: "head", layer: layer.index, head, zoom: "" });
      return [
        element("a", { ...go, "aria-label": `${place}: ${link}` }, place),
        [badge(role && role.role), role ? role.role : ""],
        link,
        weight(value),
      ];
    });
    const what = way === "to" ? `what ${word} looks at` : `who looks at ${word}`;
    return plainTable(
      [`Strongest heads: ${what}`, element("small", {}, " without itself and resting places")],
      ["head", "role", "link", "weight"],
      rows,
      {
        numbers: 1,
        id: `strongest-${way}`,
      },
    );
  }
}

// What a text is to the layers of a model with several.
function textName(run, text) {
  const cross = run.layers.filter((layer) => layer.queries !== layer.keys);
  const role = cross.some((layer) => layer.keys === text)
    ? "source"
    : cross.some((layer) => layer.queries === text)
      ? "target"
      : "text";
  return `${role}: ${isolated(short(text.tokens.slice(0, 12).join(" "), 30))}`;
}
