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
        onhover: (found) => this.tell(found, name),
        onzoom: (zoom) => this.zoomed(zoom, name),
      });
    this.maps = Object.fromEntries(["A", "B", "A − B"].map((name, i) => [name, make(name, i)]));
    this.pictures = {};
  }

  // The other head: "run.layer.head"; by default the same head of the next run, or the next head.
  other() {
    const {
      app,
      app: { data, state },
    } = this;
    const said = state.other.split(".").map(Number);
    const named = said.length === 3 && data.runs[said[0]] && data.runs[said[0]].layers[said[1]];
    if (named && Number.isInteger(said[2]) && said[2] >= 0 && said[2] < named.heads) return said;
    if (data.runs.length < 2) return [app.run.number, app.layer.index, (app.head + 1) % app.layer.heads];
    const run = (app.run.number + 1) % data.runs.length;
    return [run, ...nearest(data.runs[run], app.layer.index, app.head)];
  }

  async show() {
    const {
      app,
      app: { data, state },
    } = this;
    const [run, index, head] = this.other();
    const turn = (this.turn = {}); // (numbers may arrive after those of a later choice)
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
      pick("B", [run, index, head], (said) => state.set({ other: said.join("."), zoom: "" })),
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
    const difference = Picture.difference(a, b);
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
    const notes = [];
    if (!difference)
      notes.push(
        `Their maps differ in size (${a.rows.length} × ${a.cols.length} and ${b.rows.length} × ${b.cols.length}), ` +
          "so there is no difference to show.",
      );
    else if (!difference.top) notes.push("These two maps are the same.");
    else if (!sameWords(a.rows, b.rows) || !sameWords(a.cols, b.cols))
      notes.push("Their tokens differ: the difference is by position, with the tokens of A.");
    fill(
      this.node,
      choices,
      element("div", { class: "line" }, this.readout),
      element("div", { class: "three" }, figures),
      notes.map((note) => element("p", { class: "note" }, note)),
      difference ? this.changes(difference) : null,
      this.measures(layer, app.head, second, head),
    );
    this.pictures = pictures;
    for (const [name, picture] of Object.entries(pictures))
      if (picture) this.maps[name].show(picture, { scale: state.scale, zoom, title: name });
    this.tell(null);
  }

  named({ layer, head }) {
    return `${this.app.data.runs.length > 1 ? `${short(layer.run.name, 30)}: ` : ""}${layer.index}.${head}`;
  }

  zoomed(zoom, from) {
    if (this.quiet) return;
    this.quiet = true;
    for (const [name, map] of Object.entries(this.maps))
      if (name !== from && this.pictures[name] && (!zoom || map.valid(zoom))) map.zoomTo(zoom);
    this.quiet = false;
    this.app.state.set({ zoom: zoom ? zoom.join(",") : "" });
  }

  // The maps have followed already.
  update(changed) {
    return changed.every((name) => name === "zoom");
  }

  tell(found, from) {
    const out = this.readout;
    out.classList.toggle("note", !found);
    if (!found) {
      delete out.dataset.value;
      return fill(out, "Point at a cell.");
    }
    const { layer } = this.pictures[from];
    const value = (name) => {
      const picture = this.pictures[name];
      return picture && found.i < picture.rows.length && found.j < picture.cols.length
        ? picture.value(found.i, found.j)
        : null;
    };
    const said = ["A", "B", "A − B"].map((name) => [name, value(name)]).filter(([, x]) => x !== null);
    fill(
      out,
      element("b", {}, isolated(spoken(layer.queries, found.query))),
      " → ",
      element("b", {}, isolated(spoken(layer.keys, found.key))),
      " ",
      said.map(([name, x]) => `${name} ${number(x)}`).join("   "),
    );
    out.dataset.value = JSON.stringify(Object.fromEntries(said));
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

// The layer and head of another run that stand where these do.
function nearest(run, layer, head) {
  const index = Math.min(layer, run.layers.length - 1);
  return [index, Math.min(head, run.layers[index].heads - 1)];
}

const sameWords = (a, b) => a.every(([, , label], i) => label === b[i][2]);
