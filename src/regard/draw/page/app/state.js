// What is shown, kept in the URL's hash, so that a view can be shared. Defaults are not written.

const DEFAULTS = {
  view: "story",
  run: 0,
  layer: -1,
  head: -1,
  q: -1,
  k: -1,
  steps: 1,
  component: -1,
  zoom: "",
  text: 0,
  word: -1,
  way: "both",
  words: 0,
  specials: 1,
  aside: 0,
  scale: "root",
  threshold: 0.02,
  top: 8,
  sort: "layer",
  down: 0,
  role: "",
  by: "",
  than: "least",
  least: "",
  tsort: "layer",
  tdown: 0,
  filter: "",
  other: "",
  versus: -1,
  theme: "",
  tour: 0,
};
// Allowed values: anybody can write an address by hand.
const AMONG = {
  view: ["story", "model", "head", "words", "flow", "table", "compare"],
  scale: ["root", "linear"],
  than: ["least", "most"],
  way: ["both", "to", "from"],
  theme: ["light", "dark"],
};
const BETWEEN = {
  steps: [0, 1],
  threshold: [0, 0.5],
  top: [1, 32],
  words: [0, 1],
  specials: [0, 1],
  aside: [0, 1],
  down: [0, 1],
  tdown: [0, 1],
};
const REST = 150; // milliseconds without a change until the address is written: browsers refuse hundreds in a row

class State {
  constructor() {
    this.listeners = [];
    this.written = location.hash;
    this.timer = undefined; // set while a change waits to be written
    this.read();
    window.addEventListener("hashchange", () => {
      if (location.hash === this.written) return;
      this.timer = clearTimeout(this.timer);
      this.written = location.hash;
      this.read();
      this.notify(Object.keys(DEFAULTS));
    });
    window.addEventListener("pagehide", () => this.write());
  }

  read() {
    Object.assign(this, DEFAULTS);
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const read = Object.hasOwn(DEFAULTS, name) ? readable(name, value) : null;
      if (read !== null) this[name] = read;
    }
  }

  // Change some values and notify listeners. A `step` can be undone by the browser's "back".
  set(changes, step = false) {
    const changed = Object.keys(changes).filter((name) => this[name] !== changes[name]);
    if (!changed.length) return;
    if (step) this.write(); // (earlier changes belong to the step before)
    Object.assign(this, changes);
    clearTimeout(this.timer);
    if (step) this.write(true);
    else this.timer = setTimeout(() => this.write(), REST);
    this.notify(changed);
  }

  write(step = false) {
    this.timer = clearTimeout(this.timer);
    const address = this.address();
    if (this.withoutAddress || address === (this.written || "#")) return;
    try {
      history[step ? "pushState" : "replaceState"](null, "", address);
      this.written = location.hash;
    } catch {
      this.withoutAddress = true; // a notebook's frame has no address: the state is kept in memory only
    }
  }

  address(changes = {}) {
    const query = new URLSearchParams();
    const state = { ...this, ...changes };
    for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) query.set(name, state[name]);
    return "#" + query.toString();
  }

  // The attributes that make an element a link to another view. A plain click changes the state itself: where the page
  // has no address (a notebook's frame), following the link would leave the page.
  link(changes) {
    const follow = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      this.set(changes, true);
    };
    return { href: this.address(changes), onclick: follow };
  }

  notify(changed) {
    for (const listener of this.listeners) listener(changed);
  }
}

// A value from an address, or null if it is not allowed.
function readable(name, value) {
  if (AMONG[name]) return AMONG[name].includes(value) ? value : null;
  if (typeof DEFAULTS[name] === "string") return value;
  const x = Number(value);
  if (value === "" || !Number.isFinite(x) || (name !== "threshold" && !Number.isInteger(x))) return null;
  return BETWEEN[name] ? clamp(x, ...BETWEEN[name]) : x;
}
