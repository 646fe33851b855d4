// Elements. Everything from outside is text: no string is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

// Children as they may be given: in lists of lists, with null for what is not there.
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined);

function fill(node, ...children) {
  node.replaceChildren(...present(children));
}

// The same, with the focus where it was: on the element itself if it is there again, else on the one with its id. Who
// works with keys would have to begin anew otherwise, at the top of the page.
function refill(node, ...children) {
  const focused = document.activeElement;
  fill(node, ...children);
  refocus(focused);
}

function refocus(focused) {
  if (document.activeElement !== document.body || focused === document.body) return; // it was not lost, or has gone on
  const again = focused.isConnected ? focused : focused.id && document.getElementById(focused.id);
  if (again) again.focus({ preventScroll: true });
}

// A number as it is read: four digits that count.
function number(x, digits = 4) {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1000) return x.toFixed(0);
  return size >= 1e-4 ? String(Number(x.toPrecision(digits))) : x.toExponential(1);
}

function short(text, length = 14) {
  const letters = Array.from(text.slice(0, 4 * length + 8));
  const fits = letters.length <= length && text.length <= 4 * length + 8;
  return fits ? text : letters.slice(0, length - 1).join("") + "…";
}

// Text of either direction, kept from turning its surroundings.
const isolated = (text) => `\u2068${text}\u2069`;

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const range = (count) => Array.from({ length: count }, (_, i) => i);

// A control with its name before it.
function field(name, control, attributes = {}) {
  return element("label", { class: "field", ...attributes }, element("span", {}, name), control);
}

function select(options, chosen, change, attributes = {}) {
  const made = options.map(([value, text]) =>
    element("option", { value, selected: String(value) === String(chosen) }, text),
  );
  return element("select", { onchange: (event) => change(event.target.value), ...attributes }, made);
}

function check(name, on, change, attributes = {}) {
  const box = element("input", {
    type: "checkbox",
    checked: on,
    onchange: (event) => change(event.target.checked),
    ...attributes,
  });
  return element("label", { class: "check" }, box, name);
}
