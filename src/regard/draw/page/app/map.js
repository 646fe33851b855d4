// A map on the screen: labels, zoom by wheel, pinch and keys, pan by dragging, the value under the pointer.

const LETTERS = 11; // font size of labels, in pixels

class MapView {
  constructor({ name, id, onhover = null, onpick = null, onzoom = null, ondrop = null }) {
    Object.assign(this, { onhover, onpick, onzoom, ondrop });
    this.canvas = element("canvas", {
      class: "plane",
      id,
      tabindex: 0,
      role: "application",
      "aria-roledescription": "attention map",
      "aria-label": name,
    });
    this.labels = shape("svg", { class: "labels", "aria-hidden": "true" });
    this.mark = shape("svg", { class: "mark", "aria-hidden": "true" });
    this.buttons = element(
      "div",
      { class: "zoom" },
      ...[
        ["+", "zoom in", 0.5],
        ["−", "zoom out", 2],
        ["⤢", "show all", 0],
      ].map(([sign, title, factor]) =>
        element(
          "button",
          {
            type: "button",
            title,
            "aria-label": title,
            id: `${id}-${title.replace(" ", "-")}`,
            onclick: () => (factor ? this.zoomBy(factor) : this.zoomTo(null)),
          },
          sign,
        ),
      ),
    );
    this.node = element("div", { class: "map" }, this.labels, this.canvas, this.mark, this.buttons);
    this.picture = null;
    this.cursor = null;
    this.pointers = new Map();
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) this.canvas.addEventListener(end, (event) => this.up(event));
    this.canvas.addEventListener("pointerleave", () => this.pointers.size || this.hover(this.cursor));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(this.node);
  }

  show(picture, { scale = "root", zoom = null, title = "" } = {}) {
    this.picture = picture;
    this.scale = scale;
    this.window = this.valid(zoom) || [0, picture.rows.length, 0, picture.cols.length];
    const size = `${picture.rows.length} rows, queries, by ${picture.cols.length} columns, keys`;
    const keys = "Arrow keys move from cell to cell, plus and minus zoom, escape lets go.";
    this.canvas.setAttribute("aria-label", `${title}: ${size}. ${keys}`);
    this.paint();
    this.cursor = null;
    this.layout();
  }

  // Images of the values, a pixel each; the screen shows parts of them.
  paint() {
    const { picture, scale } = this;
    this.image = painted(picture.values, picture.rows.length, picture.cols.length, picture.top, {
      signed: picture.signed,
      scale,
    });
    const own = picture.layer.crops.filter((crop) => crop.head === picture.head && crop.codes && !picture.parts);
    const values = own.map((crop) => decodeAll(crop.codes, crop.scale[0], crop.bits));
    const { links } = picture.layer;
    const kept = [...values.map(largest), links ? links.weights.scale[picture.head] : 0];
    this.top = colourTop(kept, picture.layer.m); // of single weights
    this.crops = own.map((crop, i) => ({
      crop,
      image: painted(values[i], crop.shape[1], crop.shape[2], this.top, { scale }),
    }));
  }

  // A window that can be shown, or null: rounding may have pushed it a little over the edge.
  valid(zoom) {
    if (!zoom || zoom.length !== 4 || !zoom.every(Number.isFinite)) return null;
    const { rows, cols } = this.picture;
    const [r0, r1, c0, c1] = zoom.map((x, i) => clamp(x, 0, (i < 2 ? rows : cols).length));
    const near = [r0, r1, c0, c1].every((x, i) => Math.abs(x - zoom[i]) < 0.01);
    return near && r0 < r1 && c0 < c1 ? [r0, r1, c0, c1] : null;
  }

  get unzoomed() {
    const [r0, r1, c0, c1] = this.window;
    return r0 <= 0 && c0 <= 0 && r1 >= this.picture.rows.length && c1 >= this.picture.cols.length;
  }

  // Tokens in a unit, along each axis: more than one in a pooled map.
  get tokens() {
    const { layer, rows, cols } = this.picture;
    return layer.pooled ? [layer.n / rows.length, layer.m / cols.length] : [1, 1];
  }

  get exact() {
    const [r0, r1] = this.window;
    return this.height / (r1 - r0) / this.tokens[0] >= 2; // a token is large enough to be seen
  }

  // The step of the cursor: a cell, or a token of a pooled map if tokens are visible.
  get unit() {
    return this.picture.layer.pooled && !this.picture.parts && this.exact ? this.tokens : [1, 1];
  }

  layout() {
    if (!this.picture || !this.node.clientWidth) return;
    const { rows, cols } = this.picture;
    const room = this.node.clientWidth;
    const longest = (groups) =>
      groups.slice(0, 400).reduce((most, group) => Math.max(most, widthOf(short(axisLabel(group), 16))), 1) +
      (groups.length > 60 ? widthOf("000 ") : 0);
    const least = this.picture.layer.pooled ? 64 : 34; // (tokens become visible when zoomed in)
    this.left = Math.ceil(clamp(10 + longest(rows), least, Math.max(Math.min(room * 0.3, 110), least)));
    this.above = Math.ceil(clamp(10 + longest(cols), least, 96));
    const most = Math.max(240, window.innerHeight - 310);
    const cell = Math.min(
      (room - this.left - 4) / cols.length,
      Math.max(most / rows.length, (room - this.left) / cols.length / 8),
      56,
    );
    this.width = Math.round(clamp(cell * cols.length, 56, room - this.left - 4));
    this.height = Math.round(clamp(cell * rows.length, 56, most));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    Object.assign(this.canvas.style, {
      width: `${this.width}px`,
      height: `${this.height}px`,
      left: `${this.left}px`,
      top: `${this.above}px`,
    });
    for (const svg of [this.labels, this.mark]) {
      svg.setAttribute("width", this.left + this.width + 4);
      svg.setAttribute("height", this.above + this.height + 4);
    }
    this.node.style.height = `${this.above + this.height + 40}px`;
    this.draw();
  }

  draw() {
    const { canvas, picture } = this;
    const context = canvas.getContext("2d");
    const [r0, r1, c0, c1] = this.window;
    const [x, y] = [canvas.width / (c1 - c0), canvas.height / (r1 - r0)];
    context.imageSmoothingEnabled = x < 1 || y < 1; // (or cells smaller than a pixel would be lost)
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.setTransform(x, 0, 0, y, -c0 * x, -r0 * y);
    context.drawImage(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    const [tall, wide] = this.tokens;
    const frames = [];
    if (picture.layer.pooled && !picture.parts) {
      if (this.exact) this.drawLinks(context, tall, wide);
      for (const { crop, image } of this.crops) {
        const place = [crop.col / wide, crop.row / tall, crop.shape[2] / wide, crop.shape[1] / tall];
        if (this.exact) context.drawImage(image, ...place);
        frames.push(place);
      }
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.frames = frames;
    this.node.classList.toggle("zoomed", !this.unzoomed);
    this.drawLabels();
    this.drawMark();
  }

  // The strongest links are drawn at their own place within a cell.
  drawLinks(context, tall, wide) {
    const { layer, head } = this.picture;
    if (!layer.links) return;
    const [r0, r1, c0, c1] = this.window;
    for (let q = Math.max(0, Math.floor(r0 * tall)); q < Math.min(layer.n, r1 * tall); q++) {
      for (const [k, weight] of layer.strongest(head, q, 8)) {
        if (k < c0 * wide - 1 || k > c1 * wide) continue;
        context.fillStyle = colourOf(weight / this.top, this.scale);
        context.fillRect(k / wide, q / tall, 1 / wide, 1 / tall);
      }
    }
  }

  drawLabels() {
    const { picture, left, above, width, height } = this;
    const [r0, r1, c0, c1] = this.window;
    const [tall, wide] = this.tokens;
    const shapes = [];
    const along = (groups, text, first, last, size, per, place) => {
      const fine = per > 1 && size / (last - first) / per >= 10; // single tokens, if there is room
      const unit = fine ? 1 / per : 1;
      const pixels = (size / (last - first)) * unit;
      const skip = Math.max(1, Math.ceil(12 / pixels));
      const count = fine ? text.tokens.length : groups.length;
      for (let i = Math.floor(first / unit / skip) * skip; i < Math.min(count, Math.ceil(last / unit)); i += skip) {
        const middle = ((i + 0.5) * unit - first) * (size / (last - first));
        if (middle < 0 || middle > size) continue;
        const label = fine ? text.tokens[i] : axisLabel(groups[i]);
        const numbered = skip > 1 && per === 1 && label !== String(groups[i][0]); // a few of many
        shapes.push(place(middle, numbered ? `${groups[i][0]} ${label}` : label));
      }
    };
    const font = { "font-size": LETTERS, fill: "currentColor" };
    along(picture.rows, picture.layer.queries, r0, r1, height, tall, (y, label) =>
      shape(
        "text",
        { ...font, x: left - 5, y: above + y + 4, "text-anchor": "end", direction: "ltr" },
        isolated(fitted(label, left - 7)),
      ),
    );
    along(picture.cols, picture.layer.keys, c0, c1, width, wide, (x, label) =>
      shape(
        "text",
        { ...font, transform: `translate(${left + x + 4} ${above - 5}) rotate(-90)` },
        isolated(fitted(label, above - 7)),
      ),
    );
    shapes.push(
      shape("rect", {
        x: left - 0.5,
        y: above - 0.5,
        width: width + 1,
        height: height + 1,
        fill: "none",
        stroke: "currentColor",
        "stroke-opacity": 0.35,
      }),
    );
    fill(this.labels, shapes);
  }

  drawMark() {
    if (!this.frames) return; // (nothing is drawn yet)
    const { left, above, width, height } = this;
    const [r0, r1, c0, c1] = this.window;
    const [x, y] = [width / (c1 - c0), height / (r1 - r0)];
    const box = ([c, r, w, h], attributes) => {
      const [x0, y0] = [clamp((c - c0) * x, 0, width), clamp((r - r0) * y, 0, height)];
      const [x1, y1] = [clamp((c + w - c0) * x, 0, width), clamp((r + h - r0) * y, 0, height)];
      return x1 > x0 && y1 > y0
        ? shape("rect", { x: left + x0, y: above + y0, width: x1 - x0, height: y1 - y0, fill: "none", ...attributes })
        : null;
    };
    const shapes = this.frames.map((place) =>
      box(place, { stroke: "var(--accent)", "stroke-dasharray": "3 2", "stroke-opacity": 0.9 }),
    );
    if (this.cursor) {
      const [tall, wide] = this.unit;
      const [r, c] = this.cursor;
      shapes.push(
        box([Math.floor(c * wide) / wide, Math.floor(r * tall) / tall, 1 / wide, 1 / tall], {
          stroke: "var(--accent)",
          "stroke-width": 2,
        }),
      );
    }
    fill(this.mark, shapes);
  }

  // The position under a point of the screen, in units.
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const [r0, r1, c0, c1] = this.window;
    return [
      r0 + ((event.clientY - box.top) / box.height) * (r1 - r0),
      c0 + ((event.clientX - box.left) / box.width) * (c1 - c0),
    ];
  }

  hover(place) {
    this.onhover && this.onhover(place && this.picture.at(...place, this.exact));
  }

  // When the whole map is shown, the wheel scrolls the page.
  wheel(event) {
    if (this.unzoomed && event.deltaY > 0) return;
    event.preventDefault();
    this.zoomBy(Math.exp(clamp(event.deltaY, -60, 60) / 120), this.place(event));
  }

  zoomBy(factor, around = null) {
    const [r0, r1, c0, c1] = this.window;
    const inSight =
      this.cursor && this.cursor[0] >= r0 && this.cursor[0] < r1 && this.cursor[1] >= c0 && this.cursor[1] < c1;
    const middle = around || (inSight ? this.cursor : [(r0 + r1) / 2, (c0 + c1) / 2]);
    const { rows, cols } = this.picture;
    const [tall, wide] = this.tokens;
    const axis = (first, last, at, count, least) => {
      const size = clamp((last - first) * factor, Math.min(least, count), count);
      const start = clamp(at - ((at - first) / (last - first)) * size, 0, count - size);
      return [start, start + size];
    };
    this.zoomTo([...axis(r0, r1, middle[0], rows.length, 3 / tall), ...axis(c0, c1, middle[1], cols.length, 3 / wide)]);
  }

  zoomTo(zoom) {
    // Rounded, so that the address gives the same window to the pixel.
    const asWritten = zoom && zoom.map((x) => Math.round(x * 1e5) / 1e5);
    this.window = this.valid(asWritten) || [0, this.picture.rows.length, 0, this.picture.cols.length];
    this.draw();
    this.onzoom && this.onzoom(this.unzoomed ? null : this.window);
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    this.moved = 0;
    this.dragged = this.place(event);
  }

  spread() {
    const [a, b] = [...this.pointers.values()];
    return b ? Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) : 0;
  }

  move(event) {
    if (!this.pointers.has(event.pointerId)) return this.hover(this.place(event));
    const before = this.pointers.get(event.pointerId);
    this.moved += Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY);
    const spread = this.spread();
    this.pointers.set(event.pointerId, event);
    if (this.pointers.size === 2) {
      if (spread > 0) this.zoomBy(spread / Math.max(this.spread(), 1), this.place(event));
    } else if (this.moved > 4) {
      const [r0, r1, c0, c1] = this.window;
      const [r, c] = this.place(event);
      const [down, right] = [this.dragged[0] - r, this.dragged[1] - c];
      const top = clamp(r0 + down, 0, this.picture.rows.length - (r1 - r0));
      const start = clamp(c0 + right, 0, this.picture.cols.length - (c1 - c0));
      this.zoomTo([top, top + r1 - r0, start, start + c1 - c0]);
    }
  }

  up(event) {
    const place = this.place(event);
    this.pointers.delete(event.pointerId);
    // A finger that stays goes on dragging from where it is.
    for (const left of this.pointers.values()) this.dragged = this.place(left);
    if (event.type === "pointerup" && this.moved <= 4) this.pick(place);
  }

  pick(place) {
    const cell = this.picture.at(...place, this.exact);
    this.cursor = place;
    this.drawMark();
    this.onhover && this.onhover(cell);
    this.onpick && this.onpick(cell);
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) {
      const { rows, cols } = this.picture;
      const by = this.cursor ? steps[event.key] : [0, 0];
      const from = this.cursor || [this.window[0], this.window[2]];
      this.pick(
        [rows.length, cols.length].map((count, axis) => {
          const per = this.unit[axis];
          return (clamp(Math.floor(from[axis] * per + 1e-3) + by[axis], 0, Math.round(count * per) - 1) + 0.5) / per;
        }),
      );
      this.follow();
    } else if (event.key === "Escape" && this.cursor) this.drop();
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else if (event.key === "0") this.zoomTo(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  drop() {
    this.cursor = null;
    this.drawMark();
    this.hover(null);
    this.ondrop && this.ondrop();
  }

  // Keep the cursor visible.
  follow() {
    const [r0, r1, c0, c1] = this.window;
    const moved = ([first, last], at, per) => {
      const half = 0.5 / per;
      return Math.max(at + half - last, 0) || Math.min(at - half - first, 0);
    };
    const [down, right] = [
      moved([r0, r1], this.cursor[0], this.unit[0]),
      moved([c0, c1], this.cursor[1], this.unit[1]),
    ];
    if (Math.abs(down) > 1e-6 || Math.abs(right) > 1e-6) this.zoomTo([r0 + down, r1 + down, c0 + right, c1 + right]);
  }
}

// A cell of several tokens is labelled with its first.
const axisLabel = ([first, last, label]) => (label === `${first}–${last - 1}` ? String(first) : label);

const pen = document.createElement("canvas").getContext("2d");

// The width of a label in pixels.
function widthOf(text) {
  pen.font = `${LETTERS}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// The beginning of a text that fits.
function fitted(text, room) {
  const label = short(text, 40);
  if (widthOf(label) <= room) return label;
  const letters = Array.from(label);
  let [fits, over] = [0, letters.length];
  while (over - fits > 1) {
    const middle = (fits + over) >> 1;
    if (widthOf(`${letters.slice(0, middle).join("")}…`) <= room) fits = middle;
    else over = middle;
  }
  return `${letters.slice(0, fits).join("")}…`;
}

// The colour scale, with a note on its end.
function legend(top, scale, signed = false, note = "") {
  const count = 48;
  const values = Float32Array.from(range(count), (i) => (signed ? (2 * i) / (count - 1) - 1 : i / (count - 1)) * top);
  const bar = painted(values, 1, count, top, { signed, scale });
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  return element(
    "span",
    { class: "legend" },
    signed ? `−${number(top, 3)}` : "0",
    bar,
    number(top, 3),
    note ? element("small", {}, note) : null,
  );
}

// Why the colours of a picture end above its largest value; "" where they do not.
function scaleNote({ values, top }) {
  const most = largest(values);
  if (most >= top) return "";
  const end = top < 1 ? `${EVEN} × the uniform weight` : "1, as in every short text";
  return `colours end at ${end}; the largest here is ${number(most, 3)}`;
}
