// A map on the screen: labels, zoom by wheel, pinch and keys, pan by dragging, the value under the pointer.

class MapView {
  constructor({ name, state = null, onhover = null, onpick = null, onzoom = null }) {
    Object.assign(this, { onhover, onpick, onzoom });
    this.canvas = element("canvas", { class: "plane", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-label": name });
    this.labels = shape("svg", { class: "labels", "aria-hidden": "true" });
    this.mark = shape("svg", { class: "mark", "aria-hidden": "true" });
    this.buttons = element("div", { class: "zoom" },
      ...[["+", "zoom in", 0.5], ["−", "zoom out", 2], ["⤢", "show all", 0]].map(([sign, title, factor]) =>
        element("button", { type: "button", title, "aria-label": title, onclick: () => (factor ? this.zoomBy(factor) : this.zoomTo(null)) }, sign)));
    this.node = element("div", { class: "map" }, this.labels, this.canvas, this.mark, this.buttons);
    this.picture = null;
    this.cursor = null;
    this.pointers = new Map();
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) this.canvas.addEventListener(end, (event) => this.up(event));
    this.canvas.addEventListener("pointerleave", () => this.pointers.size || this.hover(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(this.node);
  }

  show(picture, { scale = "root", zoom = null, title = "" } = {}) {
    this.picture = picture;
    this.scale = scale;
    this.window = this.valid(zoom) || [0, picture.rows.length, 0, picture.cols.length];
    this.canvas.setAttribute("aria-label", `${title}: ${picture.rows.length} rows, queries, by ${picture.cols.length} columns, keys. Arrow keys move over cells, plus and minus zoom.`);
    this.paint();
    this.cursor = null;
    this.layout();
  }

  // Pictures of the values, one pixel for each; the screen shows parts of them.
  paint() {
    const { picture, scale } = this;
    this.image = painted(picture.values, picture.rows.length, picture.cols.length, picture.top, { signed: picture.signed, scale });
    const own = picture.layer.crops.filter((crop) => crop.head === picture.head && crop.codes && !picture.parts);
    const values = own.map((crop) => decodeAll(crop.codes, crop.scale[0], crop.bits));
    const top = Math.max(...values.map(largest), 0);
    this.crops = own.map((crop, i) => ({ crop, image: painted(values[i], crop.shape[1], crop.shape[2], top, { scale }) }));
  }

  valid(zoom) {
    if (!zoom) return null;
    const [r0, r1, c0, c1] = zoom;
    const { rows, cols } = this.picture;
    return zoom.every(Number.isFinite) && 0 <= r0 && r0 < r1 && r1 <= rows.length && 0 <= c0 && c0 < c1 && c1 <= cols.length ? zoom : null;
  }

  get whole() {
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

  layout() {
    if (!this.picture || !this.node.clientWidth) return;
    const { rows, cols } = this.picture;
    const room = this.node.clientWidth;
    const longest = (groups) => groups.slice(0, 400).reduce((a, [, , label]) => Math.max(a, Array.from(label.slice(0, 40)).length), 1);
    this.left = Math.round(clamp(8 + 6.6 * Math.min(longest(rows), 14), 34, room * 0.3));
    this.above = Math.round(clamp(8 + 6.2 * Math.min(longest(cols), 14), 30, 96));
    const most = Math.max(240, window.innerHeight - 310);
    const cell = Math.min((room - this.left - 4) / cols.length, Math.max(most / rows.length, (room - this.left) / cols.length / 8), 56);
    this.width = Math.round(clamp(cell * cols.length, Math.min(120, room - this.left - 4), room - this.left - 4));
    this.height = Math.round(clamp(cell * rows.length, 60, most));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${this.height}px`, left: `${this.left}px`, top: `${this.above}px` });
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
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.setTransform(x, 0, 0, y, -c0 * x, -r0 * y);
    context.drawImage(this.image, 0, 0);
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
    this.drawLabels();
    this.drawMark(frames);
  }

  // The strongest links stand where they are, whatever the cell around them.
  drawLinks(context, tall, wide) {
    const { layer, head } = this.picture;
    if (!layer.links) return;
    const [r0, r1, c0, c1] = this.window;
    const top = layer.links.weights.scale[head];
    for (let q = Math.max(0, Math.floor(r0 * tall)); q < Math.min(layer.n, r1 * tall); q++) {
      for (const [k, weight] of layer.strongest(head, q, 8)) {
        if (k < c0 * wide - 1 || k > c1 * wide) continue;
        context.fillStyle = colourOf(weight / top, this.scale);
        context.fillRect(k / wide, q / tall, 1 / wide, 1 / tall);
      }
    }
  }

  drawLabels() {
    const { picture, left, above, width, height } = this;
    const [r0, r1, c0, c1] = this.window;
    const [tall, wide] = this.tokens;
    const made = [];
    const along = (groups, text, first, last, size, per, place) => {
      const fine = per > 1 && size / (last - first) / per >= 10; // tokens, where there is room for them
      const unit = fine ? 1 / per : 1;
      const pixels = (size / (last - first)) * unit;
      const skip = Math.max(1, Math.ceil(12 / pixels));
      const count = fine ? text.tokens.length : groups.length;
      for (let i = Math.floor(first / unit / skip) * skip; i < Math.min(count, Math.ceil(last / unit)); i += skip) {
        const middle = ((i + 0.5) * unit - first) * (size / (last - first));
        if (middle < 0 || middle > size) continue;
        const full = fine ? text.tokens[i] : groups[i][2];
        made.push(place(middle, full, skip > 1 && per === 1 && picture.rows.length > 60 ? `${groups[i][0]} ${full}` : full));
      }
    };
    const font = { "font-size": 11, fill: "currentColor" };
    along(picture.rows, picture.layer.queries, r0, r1, height, tall, (y, full, said) =>
      shape("text", { ...font, x: left - 5, y: above + y + 4, "text-anchor": "end", direction: "ltr" }, isolated(short(said, Math.max(3, Math.floor((left - 8) / 6.6))))));
    along(picture.cols, picture.layer.keys, c0, c1, width, wide, (x, full, said) =>
      shape("text", { ...font, transform: `translate(${left + x + 4} ${above - 5}) rotate(-90)` }, isolated(short(said, Math.max(3, Math.floor((above - 8) / 6.2))))));
    made.push(shape("rect", { x: left - 0.5, y: above - 0.5, width: width + 1, height: height + 1, fill: "none", stroke: "currentColor", "stroke-opacity": 0.35 }));
    fill(this.labels, made);
  }

  drawMark(frames = []) {
    const { left, above, width, height } = this;
    const [r0, r1, c0, c1] = this.window;
    const [x, y] = [width / (c1 - c0), height / (r1 - r0)];
    const box = ([c, r, w, h], attributes) => {
      const [x0, y0] = [clamp((c - c0) * x, 0, width), clamp((r - r0) * y, 0, height)];
      const [x1, y1] = [clamp((c + w - c0) * x, 0, width), clamp((r + h - r0) * y, 0, height)];
      return x1 > x0 && y1 > y0 ? shape("rect", { x: left + x0, y: above + y0, width: x1 - x0, height: y1 - y0, fill: "none", ...attributes }) : null;
    };
    this.frames = frames.length ? frames : this.frames && !this.picture.parts && this.picture.layer.pooled ? this.frames : [];
    const made = this.frames.map((place) => box(place, { stroke: "var(--accent)", "stroke-dasharray": "3 2", "stroke-opacity": 0.9 }));
    if (this.cursor) made.push(box([this.cursor[1], this.cursor[0], 1, 1], { stroke: "var(--accent)", "stroke-width": 2 }));
    fill(this.mark, made);
  }

  // The place under a point of the screen, in units.
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const [r0, r1, c0, c1] = this.window;
    return [r0 + ((event.clientY - box.top) / box.height) * (r1 - r0), c0 + ((event.clientX - box.left) / box.width) * (c1 - c0)];
  }

  hover(place) {
    this.onhover && this.onhover(place && this.picture.at(...place, this.exact));
  }

  wheel(event) {
    event.preventDefault();
    this.zoomBy(Math.exp(clamp(event.deltaY, -60, 60) / 120), this.place(event));
  }

  zoomBy(factor, around = null) {
    const [r0, r1, c0, c1] = this.window;
    const middle = around || (this.cursor ? this.cursor.map((x) => x + 0.5) : [(r0 + r1) / 2, (c0 + c1) / 2]);
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
    this.window = (zoom && this.valid(zoom)) || [0, this.picture.rows.length, 0, this.picture.cols.length];
    this.draw();
    this.onzoom && this.onzoom(this.whole ? null : this.window);
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    this.moved = 0;
    this.dragged = { window: this.window, place: this.place(event), spread: this.spread() };
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
      const [down, right] = [this.dragged.place[0] - r, this.dragged.place[1] - c];
      const top = clamp(r0 + down, 0, this.picture.rows.length - (r1 - r0));
      const start = clamp(c0 + right, 0, this.picture.cols.length - (c1 - c0));
      this.zoomTo([top, top + r1 - r0, start, start + c1 - c0]);
    }
  }

  up(event) {
    const place = this.place(event);
    this.pointers.delete(event.pointerId);
    if (event.type === "pointerup" && this.moved <= 4) this.pick(place);
  }

  pick(place) {
    const found = this.picture.at(...place, this.exact);
    this.cursor = [found.i, found.j];
    this.drawMark();
    this.onhover && this.onhover(found);
    this.onpick && this.onpick(found);
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { rows, cols } = this.picture;
    if (steps[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const [i, j] = this.cursor || [Math.floor(this.window[0]), Math.floor(this.window[2])];
      const [di, dj] = this.cursor ? steps[event.key] : [0, 0];
      this.pick([clamp(i + di, 0, rows.length - 1) + 0.5, clamp(j + dj, 0, cols.length - 1) + 0.5]);
      this.follow();
    } else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else if (event.key === "0") this.zoomTo(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Keep the cursor in sight.
  follow() {
    const [i, j] = this.cursor;
    let [r0, r1, c0, c1] = this.window;
    const [down, right] = [Math.max(i + 1 - r1, 0) || Math.min(i - r0, 0), Math.max(j + 1 - c1, 0) || Math.min(j - c0, 0)];
    if (down || right) this.zoomTo([r0 + down, r1 + down, c0 + right, c1 + right]);
  }
}

// Text of either direction, kept from turning its surroundings.
const isolated = (text) => `\u2068${text}\u2069`;

// What the steps of colour mean.
function legend(top, scale, signed = false) {
  const count = 48;
  const values = Float32Array.from(range(count), (i) => (signed ? (2 * i) / (count - 1) - 1 : i / (count - 1)) * top);
  const bar = painted(values, 1, count, top, { signed, scale });
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  return element("span", { class: "legend" }, signed ? `−${number(top, 3)}` : "0", bar, number(top, 3));
}
