// What is shown, kept in the address, so that a view can be shared. What is as by default is not written.

const DEFAULTS = {
  view: "model", run: 0, layer: 0, head: 0, q: -1, k: -1, zoom: "", words: 0, specials: 1, scale: "root", threshold: 0.02, top: 8,
  sort: "layer", down: 0, role: "", by: "", least: "", tsort: "layer", tdown: 0, filter: "", other: "", theme: "",
};

class State {
  constructor() {
    this.listeners = [];
    this.written = null;
    this.read();
    window.addEventListener("hashchange", () => {
      if (location.hash === this.written) return;
      this.read();
      this.tell(Object.keys(DEFAULTS));
    });
  }

  read() {
    Object.assign(this, DEFAULTS);
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (!(name in DEFAULTS)) continue;
      const known = typeof DEFAULTS[name] === "number";
      if (known && !Number.isFinite(Number(value))) continue;
      this[name] = known ? Number(value) : value;
    }
  }

  // Change something: those who listen are told what.
  set(changes) {
    const changed = Object.keys(changes).filter((name) => this[name] !== changes[name]);
    if (!changed.length) return;
    Object.assign(this, changes);
    this.write();
    this.tell(changed);
  }

  write() {
    const said = new URLSearchParams();
    for (const name of Object.keys(DEFAULTS)) if (this[name] !== DEFAULTS[name]) said.set(name, this[name]);
    this.written = "#" + said.toString();
    try {
      history.replaceState(null, "", this.written);
    } catch {
      location.hash = this.written; // where a page has no history of its own, as in a notebook
    }
  }

  address(changes) {
    const said = new URLSearchParams();
    const state = { ...this, ...changes };
    for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) said.set(name, state[name]);
    return "#" + said.toString();
  }

  tell(changed) {
    for (const listener of this.listeners) listener(changed);
  }
}
