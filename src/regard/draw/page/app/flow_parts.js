// Parts of the flow view: strips of colours for vectors, bars, and a place to read numbers.

// Where the numbers under the pointer are read. It stays in sight.
class Pointed {
  constructor() {
    this.node = element("output", { class: "readout pointed", id: "flow-readout", "aria-live": "polite" });
    this.clear();
  }

  clear() {
    fill(this.node, element("span", { class: "note" }, "Point at a strip to read its numbers."));
  }

  say(text) {
    this.node.textContent = text;
  }
}

// Which of some equal parts of an element the pointer is over.
function partAt(event, count) {
  const box = event.currentTarget.getBoundingClientRect();
  return clamp(Math.floor(((event.clientX - box.left) / box.width) * count), 0, count - 1);
}

// A vector as a strip of colours; pointing at it says its numbers. `parts`: how many heads it has side by side.
function vectorStrip(pointed, values, name, parts = 1, choose = null) {
  const top = largest(values.map(Math.abs));
  const canvas = painted(values, 1, values.length, top, { signed: true, scale: "linear" });
  const norm = normOf(values);
  canvas.className = "strip";
  canvas.setAttribute("role", "img");
  canvas.setAttribute(
    "aria-label",
    `${name}: ${values.length} numbers, norm ${number(norm, 3)}, from ${number(-top, 3)} to ${number(top, 3)}`,
  );
  canvas.addEventListener("pointermove", (event) => {
    const i = partAt(event, values.length);
    const part = parts > 1 ? `head ${Math.floor((i * parts) / values.length)}, ` : "";
    pointed.say(`${name}[${i}] = ${number(values[i])} (${part}norm ${number(norm)})`);
  });
  if (choose) canvas.addEventListener("click", (event) => choose(partAt(event, values.length)));
  return canvas;
}

// A strip, and its first numbers.
function vectorLine(pointed, values, name, parts = 1, choose = null) {
  if (!values) return null;
  return element(
    "div",
    { class: "vector" },
    vectorStrip(pointed, values, name, parts, choose),
    element("code", {}, digits(values)),
  );
}

// A row of a map as a strip of colours.
function weightStrip(pointed, layer, head, query, scale) {
  const [, rows, cols] = layer.map.shape;
  const i = Math.floor((query * rows) / layer.n);
  const values = Float32Array.from(range(cols), (j) => layer.cell(head, i, j).value);
  const canvas = painted(values, 1, cols, 1, { scale });
  canvas.className = "strip weights";
  canvas.setAttribute("aria-hidden", "true");
  canvas.addEventListener("pointermove", (event) => {
    const j = partAt(event, cols);
    const [first, last] = [Math.ceil((j * layer.m) / cols), Math.ceil(((j + 1) * layer.m) / cols)];
    pointed.say(`head ${head} → ${isolated(spoken(layer.keys, [first, last]))}: ${number(values[j])}`);
  });
  return canvas;
}

// A bar of a share of its width, and its number.
function shareBar(share, text) {
  const width = 90;
  return shape(
    "svg",
    { width: width + 46, height: 14, role: "img", "aria-label": text },
    shape("rect", { x: 0, y: 2, width: Math.max(1, width * share), height: 10, fill: "var(--line)" }),
    shape("text", { x: width * share + 4, y: 11, "font-size": 11, fill: "currentColor" }, text),
  );
}

// A bar to the left or right of the middle, for a share from -1 to 1, and its number; without one, a picture of what
// stands beside it.
function signedBar(part, text = "", half = 45) {
  const share = finite(part);
  const [x, width] = share < 0 ? [half + half * share, -half * share] : [half, half * share];
  const fill = share < 0 ? "var(--against)" : "var(--line)";
  const name = text ? { role: "img", "aria-label": text } : { "aria-hidden": "true" };
  return shape(
    "svg",
    { width: 2 * half + (text ? 40 : 1), height: 14, ...name },
    shape("line", { x1: half, x2: half, y1: 0, y2: 14, stroke: "currentColor", "stroke-opacity": 0.5 }),
    shape("rect", { x, y: 2, width: Math.max(width, 0.5), height: 10, fill }),
    text ? shape("text", { x: 2 * half + 4, y: 11, "font-size": 11, fill: "currentColor" }, text) : null,
  );
}

function flowStage(sign, name, shapes, ...content) {
  return element(
    "section",
    { class: "stage" },
    element("h3", {}, element("i", { class: "badge" }, sign), ` ${name} `, element("code", {}, shapes)),
    content,
  );
}

function flowArrow(...lines) {
  const rows = lines.map((line, i) => element("span", {}, i ? line : `↓ ${line}`));
  return element("p", { class: "arrow" }, rows);
}

// 0 for what is no number, where something is drawn of it.
const finite = (x) => (Number.isFinite(x) ? x : 0);

// Numbers in brackets: a shape.
const dims = (...numbers) => `(${numbers.join(", ")})`;

// The norm of a vector, and its first numbers.
function digits(values, count = 6) {
  const first = [...values.slice(0, count)].map((x) => number(x, 3)).join(", ");
  return `norm ${number(normOf(values), 3)} [${first}${values.length > count ? ", …" : ""}]`;
}

const normOf = (values) => Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));

const cosineOf = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0) / (normOf(a) * normOf(b));

function joined(parts) {
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
