// What is shown, kept in the address, so that a view can be shared. What is as by default is not written.

const DEFAULTS = {
  view: "model",
  run: 0,
  layer: 0,
  head: 0,
  q: -1,
  k: -1,
  zoom: "",
  words: 0,
  specials: 1,
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
  theme: "",
};
// What may stand in an address: anybody can write one by hand.
const AMONG = {
  view: ["model", "head", "flow", "table", "compare"],
  scale: ["root", "linear"],
  than: ["least", "most"],
  theme: ["light", "dark"],
};
const BETWEEN = { threshold: [0, 0.5], top: [1, 32], words: [0, 1], specials: [0, 1], down: [0, 1], tdown: [0, 1] };
const REST = 150; // milliseconds without a change until it is written: browsers refuse hundreds of addresses in a row

class State {
  constructor() {
    this.listeners = [];
    this.written = location.hash;
    this.timer = undefined; // while something waits to be written
    this.read();
    window.addEventListener("hashchange", () => {
      if (location.hash === this.written) return;
      this.timer = clearTimeout(this.timer);
      this.written = location.hash;
      this.read();
      this.tell(Object.keys(DEFAULTS));
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

  // Change something: those who listen are told what. A step of its own is one that the browser's "back" undoes.
  set(changes, step = false) {
    const changed = Object.keys(changes).filter((name) => this[name] !== changes[name]);
    if (!changed.length) return;
    if (step) this.write(); // what came before belongs to the step before
    Object.assign(this, changes);
    clearTimeout(this.timer);
    if (step) this.write(true);
    else this.timer = setTimeout(() => this.write(), REST);
    this.tell(changed);
  }

  write(step = false) {
    this.timer = clearTimeout(this.timer);
    const address = this.address();
    if (this.homeless || address === (this.written || "#")) return;
    try {
      history[step ? "pushState" : "replaceState"](null, "", address);
      this.written = location.hash;
    } catch {
      this.homeless = true; // a frame in a notebook has no address of its own: what is shown is remembered here alone
    }
  }

  address(changes = {}) {
    const said = new URLSearchParams();
    const state = { ...this, ...changes };
    for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) said.set(name, state[name]);
    return "#" + said.toString();
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

  tell(changed) {
    for (const listener of this.listeners) listener(changed);
  }
}

// A value from an address, or null if it cannot be one.
function readable(name, value) {
  if (AMONG[name]) return AMONG[name].includes(value) ? value : null;
  if (typeof DEFAULTS[name] === "string") return value;
  const x = Number(value);
  if (value === "" || !Number.isFinite(x) || (name !== "threshold" && !Number.isInteger(x))) return null;
  return BETWEEN[name] ? clamp(x, ...BETWEEN[name]) : x;
}
