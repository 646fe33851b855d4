// Compare: two heads, two texts, or the same head with and without others, side by side, and the difference.

class CompareView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view compare", "aria-label": "Compare" });
    this.readout = element("output", { class: "readout", id: "compare-readout", "aria-live": "polite" });
    const make = (name, i) =>
      new MapView({
        name,
        id: `map-${i}`,
        onhover: (cell) => this.showReadout(cell, name),
        onzoom: (zoom) => this.zoomed(zoom, name),
      });
    this.maps = Object.fromEntries(["A", "B", "A − B"].map((name, i) => [name, make(name, i)]));
    this.pictures = {};
  }

  // The other head: "run.layer.head"; by default the same head of the next run, or another head that has a role.
  other() {
    const {
      app,
      app: { data, state },
    } = this;
    const parts = state.other.split(".").map(Number);
    const named = parts.length === 3 && data.runs[parts[0]] && data.runs[parts[0]].layers[parts[1]];
    if (named && Number.isInteger(parts[2]) && parts[2] >= 0 && parts[2] < named.heads) return parts;
    if (data.runs.length < 2) return [app.run.number, ...beside(app.run, app.layer, app.head)];
    const run = (app.run.number + 1) % data.runs.length;
    return [run, ...nearest(data.runs[run], app.layer.index, app.head)];
  }

  // Where no head was chosen: the one that changes most between these runs; null if that is not known.
  best() {
    const found = this.ranking();
    return found && found.heads && found.heads.length ? [found.heads[0].layer, found.heads[0].head] : null;
  }

  // What is known of the heads that change between the run of A and that of B, the other way round if it has to be.
  ranking() {
    const { data, state } = this.app;
    if (!data || data.runs.length < 2 || !data.meta.changes) return null;
    const a = this.app.run.number;
    const named = Number(state.other.split(".")[0]);
    const b = state.other && data.runs[named] ? named : (a + 1) % data.runs.length;
    const found = data.meta.changes.find(({ runs }) => runs.includes(a) && runs.includes(b) && a !== b);
    if (!found || !found.heads || found.runs[0] === a) return found || null;
    const turned = ({ query, key, before, after, ...rest }) => ({
      ...rest,
      query: [query[1], query[0]],
      key: [key[1], key[0]],
      before: after,
      after: before,
    });
    return { ...found, runs: [a, b], of: [found.of[1], found.of[0]], heads: found.heads.map(turned) };
  }

  async show() {
    const {
      app,
      app: { data, state },
    } = this;
    const [run, index, head] = this.other();
    const turn = (this.turn = {}); // (data may arrive after those of a later choice)
    const [layer, second] = await Promise.all([app.layer.ready(), data.runs[run].layers[index].ready()]);
    if (app.view !== this || this.turn !== turn) return;
    const pick = (name, [r, l, h], change) => {
      const runs = data.runs;
      return element(
        "fieldset",
        { class: "controls" },
        element("legend", {}, name),
        runs.length > 1
          ? field(
              "Run",
              select(
                runs.map((one, i) => [i, short(one.name, 40)]),
                r,
                (x) => change([Number(x), ...nearest(runs[x], l, h)]),
                { id: `run-${name}` },
              ),
            )
          : null,
        field(
          "Layer",
          select(
            runs[r].layers.map((one) => [one.index, `${one.index} · ${one.name}`]),
            l,
            (x) => change([r, Number(x), Math.min(h, runs[r].layers[x].heads - 1)]),
            { id: `layer-${name}` },
          ),
        ),
        field(
          "Head",
          select(
            range(runs[r].layers[l].heads).map((i) => [i, i]),
            h,
            (x) => change([r, l, Number(x)]),
            { id: `head-${name}` },
          ),
        ),
      );
    };
    const texts = [layer, second].filter((one) => !one.pooled).flatMap((one) => [one.queries, one.keys]);
    const choices = element(
      "div",
      { class: "choices" },
      pick("A", [app.run.number, layer.index, app.head], ([r, l, h]) =>
        state.set({ run: r, layer: l, head: h, zoom: "" }),
      ),
      pick("B", [run, index, head], (other) => state.set({ other: other.join("."), zoom: "" })),
      texts.some((text) => text.special.size)
        ? check("special tokens", Boolean(state.specials), (on) => state.set({ specials: Number(on), zoom: "" }), {
            id: "specials",
          })
        : null,
      texts.some((text) => text.piecesOfWords)
        ? check("whole words", Boolean(state.words), (on) => state.set({ words: Number(on), zoom: "" }), {
            id: "words",
          })
        : null,
    );
    if (!layer.map || !second.map) {
      fill(
        this.node,
        choices,
        element(
          "p",
          { class: "note" },
          'Of these layers no maps were kept: watch(model, keep="qk") keeps what they need.',
        ),
        this.measures(layer, app.head, second, head),
      );
      return;
    }
    const options = { specials: Boolean(state.specials), words: Boolean(state.words) };
    const a = Picture.of(layer, app.head, options);
    const b = Picture.of(second, head, options);
    const difference = differenceOf(a, b);
    const pictures = { A: a, B: b, "A − B": difference };
    const zoom = state.zoom ? state.zoom.split(",").map(Number) : null;
    const top = Math.max(a.top, b.top);
    a.top = b.top = top; // one scale of colours for both
    const figures = Object.entries(this.maps)
      .filter(([name]) => pictures[name])
      .map(([name, map]) =>
        element(
          "figure",
          {},
          element(
            "figcaption",
            {},
            element("b", {}, name),
            ` ${name === "A" ? this.named(a) : name === "B" ? this.named(b) : ""} `,
            legend(pictures[name].top, state.scale, pictures[name].signed),
          ),
          map.node,
        ),
      );
    const notes = this.notes(a, b, difference);
    const ranked = element("div", { class: "ranked" }, this.ranked([run, index, head]));
    fill(
      this.node,
      choices,
      ranked,
      element("div", { class: "line" }, this.readout),
      element("div", { class: "three" }, figures),
      notes.map((note) => element("p", { class: "note" }, note)),
      difference ? this.changes(difference) : null,
      this.measures(layer, app.head, second, head),
    );
    this.pictures = pictures;
    for (const [name, picture] of Object.entries(pictures))
      if (picture) this.maps[name].show(picture, { scale: state.scale, zoom, title: name });
    this.showReadout(null);
    if (data.runs.length < 2) this.showAlike(ranked, turn).catch((error) => app.fail(error));
  }

  // What has to be said of the difference.
  notes(a, b, difference) {
    const sizes = `${a.rows.length} × ${a.cols.length} and ${b.rows.length} × ${b.cols.length}`;
    if (!difference)
      return [`Their maps differ in size (${sizes}) and share no tokens, so there is no difference to show.`];
    const notes = [];
    const { shared } = difference;
    if (shared)
      notes.push(
        `The texts are aligned where they share words: the difference is over ${shared.rows.length} queries and ` +
          `${shared.cols.length} keys (of ${sizes}); all others are left out. On keys that B does not have A has ` +
          `${percent(elsewhere(a, shared, 0))} of its mass, on those that A does not have B has ` +
          `${percent(elsewhere(b, shared, 1))} (mean over shared queries).`,
      );
    else if (difference.byPosition)
      notes.push("Their tokens differ: the difference is by position, with the tokens of A.");
    if (!difference.top) notes.push(shared ? "There, these two maps are the same." : "These two maps are the same.");
    return notes;
  }

  // The heads that change most between the runs of A and B.
  ranked([run, index, head]) {
    const found = this.ranking();
    if (!found) return null;
    const { data, state } = this.app;
    if (!found.heads) return element("p", { class: "note" }, `Heads are not ranked: ${found.why}`);
    const [a, b] = found.runs.map((number) => data.runs[number]);
    const items = found.heads.map((one) => {
      const layer = a.layers[one.layer];
      const link = `${short(layer.queries.tokens[one.query[0]], 12)} → ${short(layer.keys.tokens[one.key[0]], 12)}`;
      return this.item(
        layer,
        one.head,
        one.change,
        [isolated(link), ` ${number(one.before, 2)} → ${number(one.after, 2)}`],
        { run: a.number, layer: one.layer, head: one.head, other: `${b.number}.${one.layer}.${one.head}`, zoom: "" },
        this.app.layer === layer &&
          this.app.head === one.head &&
          run === b.number &&
          index === one.layer &&
          head === one.head,
      );
    });
    const of =
      found.of[0] === found.of[1] && found.of[0] === found.shared ? "" : ` shared, of ${found.of.join(" and ")}`;
    return this.list(
      "changed",
      "Heads that change most",
      `from ${isolated(short(a.name, 40))} to ${isolated(short(b.name, 40))}. The number is the distance of a query’s ` +
        `weights in the two runs (total variation: 0 the same, 1 nothing in common), the mean over ${found.shared} ` +
        `queries${of}; below it, the weight that changes most.`,
      items,
    );
  }

  // A head of a ranked list: a link that shows it.
  item(layer, head, score, what, changes, chosen) {
    const role = layer.role(head);
    return element(
      "li",
      {},
      element(
        "a",
        { ...this.app.state.link(changes), "aria-current": chosen ? "true" : null, class: "change" },
        element("b", {}, `${layer.index}.${head}`),
        element("span", { class: "score" }, number(score, 2)),
        element("span", { class: "meter", "aria-hidden": "true" }, meter(score)),
        element("span", { class: "role" }, role ? role.role : ""),
        what.length ? element("span", { class: "said" }, what) : null,
      ),
    );
  }

  // A list of heads, the first ones; the others on request.
  list(id, title, note, items) {
    const FEW = 8;
    const list = element("ol", { class: "changes", id }, items.slice(0, FEW));
    const more = element(
      "button",
      {
        type: "button",
        id: `${id}-more`,
        hidden: items.length <= FEW,
        "aria-expanded": "false",
        onclick: () => {
          const all = list.children.length > FEW;
          fill(list, all ? items.slice(0, FEW) : items);
          more.textContent = all ? `all ${items.length}` : "fewer";
          more.setAttribute("aria-expanded", String(!all));
        },
      },
      `all ${items.length}`,
    );
    return element(
      "section",
      { "aria-labelledby": `${id}-title` },
      element("h2", { id: `${id}-title` }, title),
      element("p", { class: "note" }, note),
      list,
      more,
    );
  }

  // With one run: the heads whose maps are most like that of A, and least.
  async showAlike(node, turn) {
    const { app } = this;
    const { layer, head } = app;
    const layers = app.run.layers.filter((one) => one.map && sameShape(one.map.shape, layer.map.shape));
    await Promise.all(layers.map((one) => one.ready()));
    if (app.view !== this || this.turn !== turn) return;
    const own = layer.matrix(head);
    const [, rows, cols] = layer.map.shape;
    const found = layers
      .flatMap((one) => range(one.heads).map((i) => ({ one, i })))
      .filter(({ one, i }) => one !== layer || i !== head)
      .map((place) => ({ ...place, far: distance(own, place.one.matrix(place.i), rows, cols) }))
      .filter(({ far }) => Number.isFinite(far))
      .sort((a, b) => a.far - b.far);
    if (!found.length) return;
    const other = this.other().join(".");
    const item = ({ one, i, far }) => {
      const place = `${app.run.number}.${one.index}.${i}`;
      return this.item(one, i, far, "", { layer: layer.index, head, other: place, zoom: "" }, place === other);
    };
    const cells = layer.pooled ? "cells" : "keys";
    fill(
      node,
      this.list(
        "alike",
        `Heads most like ${layer.index}.${head}`,
        `The number is the distance of their maps (total variation over ${cells}: 0 the same, 1 nothing in common), ` +
          "the mean over queries.",
        found.slice(0, 40).map(item),
      ),
      this.list(
        "unlike",
        `Heads least like ${layer.index}.${head}`,
        "The same distance, the farthest first.",
        found.slice(-40).reverse().map(item),
      ),
    );
  }

  named({ layer, head }) {
    return `${this.app.data.runs.length > 1 ? `${short(layer.run.name, 30)}: ` : ""}${layer.index}.${head}`;
  }

  zoomed(zoom, from) {
    const difference = this.pictures["A − B"];
    if (this.quiet || !difference || difference.shared) return; // (maps of different units zoom each by itself)
    this.quiet = true;
    for (const [name, map] of Object.entries(this.maps))
      if (name !== from && this.pictures[name] && (!zoom || map.valid(zoom))) map.zoomTo(zoom);
    this.quiet = false;
    this.app.state.set({ zoom: zoom ? zoom.join(",") : "" });
  }

  // The maps are already zoomed.
  update(changed) {
    return changed.every((name) => name === "zoom");
  }

  showReadout(cell, from) {
    const out = this.readout;
    out.classList.toggle("note", !cell);
    if (!cell) {
      delete out.dataset.value;
      return fill(out, "Point at a cell.");
    }
    const { layer } = this.pictures[from];
    const value = (name) => {
      const picture = this.pictures[name];
      const at = picture && this.place(cell, from, name);
      return at && at[0] < picture.rows.length && at[1] < picture.cols.length ? picture.value(...at) : null;
    };
    const values = ["A", "B", "A − B"].map((name) => [name, value(name)]).filter(([, x]) => x !== null);
    fill(
      out,
      element("b", {}, isolated(spoken(layer.queries, cell.query))),
      " → ",
      element("b", {}, isolated(spoken(layer.keys, cell.key))),
      " ",
      values.map(([name, x]) => `${name} ${number(x)}`).join("   "),
    );
    out.dataset.value = JSON.stringify(Object.fromEntries(values));
  }

  // Where a cell of one map is in another; null if they do not share its tokens.
  place({ i, j }, from, to) {
    const { shared } = this.pictures["A − B"] || {};
    if (!shared || from === to) return [i, j];
    const column = { A: 0, B: 1 };
    const translated = (pairs, at) => {
      const pair = from in column ? pairs.findIndex((one) => one[column[from]] === at) : at;
      if (pair < 0) return -1;
      return to in column ? pairs[pair][column[to]] : pair;
    };
    const [r, c] = [translated(shared.rows, i), translated(shared.cols, j)];
    return r < 0 || c < 0 ? null : [r, c];
  }

  changes(picture) {
    const rows = picture.largest(10).map(([i, j, value]) =>
      element(
        "tr",
        {},
        element("td", {}, isolated(short(picture.rows[i][2], 20))),
        element("td", {}, isolated(short(picture.cols[j][2], 20))),
        picture.parts.map((part) => element("td", {}, number(part.value(i, j)))),
        element("td", {}, number(value)),
      ),
    );
    return element(
      "table",
      { class: "plain", id: "changes" },
      element("caption", {}, "Largest differences"),
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ["query", "key", "A", "B", "A − B"].map((name) => element("th", { scope: "col" }, name)),
        ),
      ),
      element("tbody", {}, rows),
    );
  }

  measures(a, i, b, j) {
    const names = Object.keys(a.measures).filter((name) => b.measures[name]);
    const rows = names.map((name) => {
      const [x, y] = [a.measured(name, i), b.measured(name, j)];
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, name),
        [x, y, x - y].map((value) => element("td", {}, number(value))),
      );
    });
    return element(
      "table",
      { class: "plain" },
      element("caption", {}, "Measures"),
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ["", "A", "B", "A − B"].map((name) => element("th", { scope: "col" }, name)),
        ),
      ),
      element("tbody", {}, rows),
    );
  }
}
