// The page: which view is shown, of which head; keys; themes.

const VIEWS = [
  ["story", "Story", StoryView],
  ["model", "Model", ModelView],
  ["head", "Head", HeadView],
  ["words", "Words", WordsView],
  ["flow", "Flow", FlowView],
  ["table", "Table", TableView],
  ["compare", "Compare", CompareView],
];

class App {
  constructor(data, live) {
    this.state = new State();
    this.live = live;
    this.data = data;
    this.main = document.getElementById("main");
    this.top = document.getElementById("top");
    this.status = element("p", { class: "status", role: "alert" });
    this.announcer = element("p", { class: "unseen", role: "status", id: "announcer" }); // for screen readers
    this.main.after(this.announcer);
    this.tour = new Tour(this);
    this.scrolled = new Map(); // the scroll position of each view
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault(); // (or the address would hold the name of an element instead of the view)
      this.main.focus();
    });
    this.views = Object.fromEntries(VIEWS.map(([name, , View]) => [name, new View(this)]));
    this.state.listeners.push((changed) => this.changed(changed));
    document.addEventListener("keydown", (event) => this.key(event));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.changed(["theme"]));
    this.changed(["theme"]);
  }

  // New data, on a live page.
  load(data) {
    const first = !this.data; // (the address may hold a view of it)
    this.data = data;
    if (!first)
      this.state.set({
        run: 0,
        layer: -1,
        head: -1,
        q: -1,
        k: -1,
        text: 0,
        word: -1,
        zoom: "",
        other: "",
        role: "",
        by: "",
        sort: "layer",
        filter: "",
      });
    this.show();
  }

  get run() {
    return this.data.runs[clamp(this.state.run, 0, this.data.runs.length - 1)];
  }

  // The layer and head where none was chosen: by the view, or the clearest of the text.
  get best() {
    return (this.view.best && this.view.best()) || this.run.best;
  }

  get layer() {
    const wanted = this.state.layer < 0 ? this.best[0] : this.state.layer;
    return this.run.layers[clamp(wanted, 0, this.run.layers.length - 1)];
  }

  get head() {
    const best = this.state.layer < 0 ? this.best[1] : 0;
    return clamp(this.state.head < 0 ? best : this.state.head, 0, this.layer.heads - 1);
  }

  get view() {
    return this.views[this.state.view];
  }

  changed(changed) {
    if (changed.includes("theme")) {
      const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
      document.documentElement.dataset.theme = this.state.theme || (dark ? "dark" : "light");
    }
    const same = this.shown === this.view && this.view.update && this.view.update(changed);
    if (!same) this.show();
    else for (const [name, tab] of Object.entries(this.tabs)) tab.href = this.state.address({ view: name });
    this.announce(changed);
    this.tour.update();
  }

  show() {
    const focused = document.activeElement;
    this.header();
    if (!this.data || !this.data.runs.length) return refocus(focused);
    const other = this.shown !== this.view;
    if (other) {
      if (this.shown) this.scrolled.set(this.shown, window.scrollY);
      fill(this.main, this.status, this.view.node);
    }
    this.shown = this.view;
    this.status.textContent = "";
    const turn = (this.latest = {});
    this.main.setAttribute("aria-busy", "true");
    Promise.resolve(this.view.show())
      .catch((error) => this.fail(error))
      .finally(() => {
        refocus(focused);
        if (this.latest === turn) this.main.setAttribute("aria-busy", "false");
      });
    if (other) window.scrollTo(0, this.scrolled.get(this.view) || 0);
  }

  fail(error) {
    this.status.textContent = `This view could not be shown: ${error.message}`;
  }

  announce(changed) {
    if (!this.data || !["view", "run", "layer", "head"].some((name) => changed.includes(name))) return;
    const which = ["head", "flow", "compare"].includes(this.state.view) ? `: ${this.layer.label(this.head)}` : "";
    this.announcer.textContent = `${this.state.view}${which}`;
  }

  header() {
    const { state, data } = this;
    this.tabs = Object.fromEntries(
      VIEWS.map(([name, title]) => [
        name,
        element(
          "a",
          { ...state.link({ view: name }), "aria-current": state.view === name ? "page" : null, id: `tab-${name}` },
          title,
        ),
      ]),
    );
    const runs =
      data && data.runs.length > 1
        ? field(
            "Run",
            select(
              data.runs.map((run, i) => [i, short(run.name, 60)]),
              this.run.number,
              (value) => this.turn(Number(value)),
              { id: "run" },
            ),
          )
        : null;
    const dark = document.documentElement.dataset.theme === "dark";
    const button = (id, title, text, act, attributes = {}) =>
      element("button", { type: "button", id, title, "aria-label": title, onclick: act, ...attributes }, text);
    const name = () =>
      `regard-${state.view}${["head", "compare"].includes(state.view) ? `-${this.layer.index}.${this.head}` : ""}`;
    fill(
      this.top,
      element(
        "h1",
        { title: data ? short(data.meta.title, 400) : "", dir: "auto" },
        data ? short(data.meta.title, 120) : "regard",
      ),
      element("nav", { "aria-label": "views" }, Object.values(this.tabs)),
      runs,
      element(
        "div",
        { class: "tools" },
        button(
          "save-svg",
          "Save this view as SVG",
          "SVG",
          () => saveSvg(this.view, name()).catch((error) => this.fail(error)),
          { disabled: !data },
        ),
        button(
          "save-png",
          "Save this view as PNG",
          "PNG",
          () => savePng(this.view, name()).catch((error) => this.fail(error)),
          { disabled: !data },
        ),
        button("theme", dark ? "Light colours" : "Dark colours", dark ? "☀" : "☾", () =>
          state.set({ theme: dark ? "light" : "dark" }),
        ),
        button("tour", "Guided tour (t)", "Tour", () => this.tour.toggle(), { disabled: !data }),
        button("help", "Keys (?)", "?", () => this.help()),
      ),
    );
    if (this.live) this.live.header(this.top);
  }

  about(layer, head) {
    const role = layer.role(head);
    const measures = Object.entries(layer.measures).map(([name, values]) => `${name} ${number(values[head], 3)}`);
    return [`${layer.name}, head ${head}`, role ? `${role.role}: ${role.words}` : "no role", ...measures].join("\n");
  }

  go(layer, head) {
    const index = clamp(layer, 0, this.run.layers.length - 1);
    this.state.set({
      layer: index,
      head: clamp(head, 0, this.run.layers[index].heads - 1),
      zoom: this.sameSize(index) ? this.state.zoom : "",
    });
  }

  sameSize(index) {
    const [a, b] = [this.layer, this.run.layers[index]];
    return a.n === b.n && a.m === b.m;
  }

  // Another run: the same place of the same text, the beginning of another.
  turn(number) {
    const [a, b] = [this.layer, this.data.runs[number].layers[this.layer.index]];
    const same =
      b && a.queries.tokens.join() === b.queries.tokens.join() && a.keys.tokens.join() === b.keys.tokens.join();
    this.state.set({ run: number, ...(same ? {} : { zoom: "", q: -1, k: -1 }) });
  }

  // The next head, of this layer or the next layer.
  step(by) {
    const heads = this.run.heads();
    const now = heads.findIndex(({ layer, head }) => layer === this.layer && head === this.head);
    const next = heads[(now + by + heads.length) % heads.length];
    this.go(next.layer.index, next.head);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const at = event.target;
    if (at instanceof HTMLInputElement || at instanceof HTMLSelectElement || at instanceof HTMLTextAreaElement) return;
    const keys = {
      "[": () => this.step(-1),
      "]": () => this.step(1),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      "{": () => this.go(this.layer.index - 1, this.head),
      "}": () => this.go(this.layer.index + 1, this.head),
      "?": () => this.help(),
      t: () => this.data && this.tour.toggle(),
      d: () => document.getElementById("theme").click(),
    };
    VIEWS.forEach(([name], i) => (keys[String(i + 1)] = () => this.state.set({ view: name }, true)));
    const moves = this.data && ["head", "flow", "compare"].includes(this.state.view);
    if (!Object.hasOwn(keys, event.key) || (/^Arrow|[[\]{}]/.test(event.key) && !moves)) return;
    event.preventDefault();
    keys[event.key]();
  }

  help() {
    let dialog = document.getElementById("keys");
    if (!dialog) {
      const lines = [
        [`1 … ${VIEWS.length}`, "views"],
        ["← → or [ ]", "previous and next head"],
        ["{ }", "layer before and after"],
        ["arrows, in a map", "from cell to cell"],
        ["+ − 0, in a map", "zoom in, out, all"],
        ["Esc, in a map", "let go of a token"],
        ["wheel, pinch, drag", "zoom and pan"],
        ["t", "guided tour: begin, leave, resume"],
        ["d", "dark or light"],
        ["?", "this list"],
      ];
      dialog = element(
        "dialog",
        { id: "keys", "aria-label": "keys" },
        element("h2", {}, "Keys"),
        element(
          "dl",
          {},
          lines.flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]),
        ),
        element(
          "p",
          {},
          "The address in the browser holds this view: share it with the file. ",
          "Weights are stored in steps; the number after ± is the size of a step.",
        ),
        element("button", { type: "button", onclick: () => dialog.close() }, "Close"),
      ); // (a form would be refused in a notebook's frame)
      document.body.append(dialog);
    }
    dialog.showModal();
  }
}

function start() {
  const meta = JSON.parse(document.getElementById("regard-meta").textContent);
  const encoded = (name) => document.getElementById(`blob-${name}`).textContent;
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("main").textContent =
      "This page needs a browser with DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or newer.";
    return;
  }
  const live = meta.live ? new Live(meta.live) : null;
  const app = new App(meta.runs.length ? new Data(meta, encoded) : null, live);
  if (live) live.begin(app);
  window.regard = app; // for the console
}

start();
