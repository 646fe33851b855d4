// The current view as a picture: redrawn as SVG, and from that as PNG.

const WITHOUT = ".zoom, .step, .pointed"; // what is left out: buttons, and what stays in sight while scrolling
const MARGIN = 16; // pixels

function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Walk the visible elements: backgrounds and borders become rectangles, text becomes text, canvases become images.
class Drawing {
  constructor(root) {
    this.frame = root.getBoundingClientRect();
    this.root = root;
    const width = Math.ceil(Math.max(this.frame.width, root.scrollWidth)) + 2 * MARGIN;
    const height = Math.ceil(Math.max(this.frame.height, root.scrollHeight)) + 2 * MARGIN;
    const paper = getComputedStyle(document.body);
    this.svg = shape(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, "font-family": paper.fontFamily },
      shape("rect", { width, height, fill: paper.backgroundColor }),
    );
    this.walk(root, this.svg, { left: -1e9, right: 1e9, top: -1e9, bottom: 1e9 });
  }

  place(box) {
    return {
      x: box.left - this.frame.left + MARGIN,
      y: box.top - this.frame.top + MARGIN,
      width: box.width,
      height: box.height,
    };
  }

  // `into`: the SVG element to draw into; `clip`: the visible part.
  walk(node, into, clip) {
    if (node.nodeType === Node.TEXT_NODE) return void into.append(...this.text(node, clip));
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches(WITHOUT)) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden" || style.opacity === "0") return;
    const box = node.getBoundingClientRect();
    if (!node.closest("thead") && !inSight(box, clip)) return; // (sticky cells may be visible though their row is not)
    const target = style.opacity === "1" ? into : into.appendChild(shape("g", { opacity: style.opacity }));
    if (node instanceof HTMLCanvasElement) return void target.append(this.canvas(node, box, style));
    if (node instanceof SVGSVGElement) return void target.append(this.copy(node, box, style));
    target.append(...this.background(box, style));
    if (node instanceof HTMLSelectElement || node instanceof HTMLInputElement)
      return void target.append(...this.control(node, box, style));
    this.children(node, target, clip, box, style);
  }

  // Overflow that an element hides is clipped by a nested SVG of its size.
  children(node, into, clip, box, style) {
    const hides = node !== this.root && (style.overflowX !== "visible" || style.overflowY !== "visible");
    const { x, y, width, height } = this.place(box);
    const target = hides
      ? into.appendChild(shape("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` }))
      : into;
    const inner = hides ? overlap(clip, box) : clip;
    const over = (child) =>
      child.nodeType === Node.ELEMENT_NODE &&
      (getComputedStyle(child).position === "sticky" || child.tagName === "THEAD");
    const all = [...node.childNodes];
    // Sticky elements are drawn last, on top.
    for (const child of [...all.filter((node) => !over(node)), ...all.filter(over)]) this.walk(child, target, inner);
  }

  canvas(node, box, style) {
    const sharp = style.imageRendering === "pixelated" ? "pixelated" : null;
    return shape("image", {
      ...this.place(box),
      href: node.toDataURL(),
      preserveAspectRatio: "none",
      "image-rendering": sharp,
    });
  }

  copy(node, box, style) {
    const copy = node.cloneNode(true);
    inline(node, copy);
    for (const text of copy.querySelectorAll("text, title")) text.textContent = proper(text.textContent);
    for (const [name, value] of Object.entries(this.place(box))) copy.setAttribute(name, value);
    copy.setAttribute("color", style.color);
    return copy;
  }

  background(box, style) {
    const none = (colour) => colour === "rgba(0, 0, 0, 0)" || colour === "transparent";
    const place = this.place(box);
    const edges = ["Top", "Left"].map(
      (side) =>
        parseFloat(style[`border${side}Width`]) > 0 &&
        style[`border${side}Style`] !== "none" &&
        style[`border${side}Color`],
    );
    const shapes = [];
    if (!none(style.backgroundColor) || (edges[0] && edges[1]))
      shapes.push(
        shape("rect", {
          ...place,
          rx: parseFloat(style.borderTopLeftRadius) || 0,
          fill: none(style.backgroundColor) ? "none" : style.backgroundColor,
          stroke: (edges[0] && edges[1] && edges[0]) || "none",
        }),
      );
    if (edges[0] && !edges[1])
      shapes.push(shape("path", { d: `M${place.x} ${place.y}h${place.width}`, stroke: edges[0] }));
    if (edges[1] && edges[1] !== edges[0])
      shapes.push(
        shape("path", {
          d: `M${place.x} ${place.y}v${place.height}`,
          stroke: edges[1],
          "stroke-width": parseFloat(style.borderLeftWidth),
        }),
      );
    const share = parseFloat(style.getPropertyValue("--share"));
    if (share > 0)
      shapes.push(
        shape("rect", {
          ...place,
          width: (place.width * share) / 100,
          fill: getComputedStyle(document.documentElement).getPropertyValue("--line").trim(),
          "fill-opacity": 0.22,
        }),
      );
    return shapes;
  }

  control(node, box, style) {
    const { x, y, width, height } = this.place(box);
    if (node.type === "range") {
      const at = x + 7 + ((width - 14) * (node.value - node.min)) / (node.max - node.min);
      return [
        shape("rect", {
          x,
          y: y + height / 2 - 2,
          width,
          height: 4,
          rx: 2,
          fill: style.color,
          "fill-opacity": 0.25,
        }),
        shape("circle", {
          cx: at,
          cy: y + height / 2,
          r: 7,
          fill: style.accentColor === "auto" ? style.color : style.accentColor,
        }),
      ];
    }
    const text =
      node instanceof HTMLSelectElement
        ? (node.selectedOptions[0] || {}).textContent || ""
        : node.type === "checkbox"
          ? node.checked
            ? "☑"
            : "☐"
          : node.value;
    return [line(text, node.type === "checkbox" ? x : x + 8, y + height * 0.5 + 5, style)];
  }

  // A text node, line by line.
  text(node, clip) {
    const style = getComputedStyle(node.parentElement);
    const part = document.createRange();
    part.selectNodeContents(node);
    const boxes = [...part.getClientRects()].filter((box) => box.width > 0);
    if (!node.nodeValue.trim() || !boxes.some((box) => inSight(box, clip))) return [];
    if (boxes.length === 1 && !/^\s/.test(node.nodeValue))
      return [this.line(node.nodeValue.trimEnd(), boxes[0], style)];
    const lines = [];
    let at = 0;
    for (const letter of node.nodeValue) {
      // (a letter may be two units long)
      part.setStart(node, at);
      part.setEnd(node, (at += letter.length));
      const box = part.getBoundingClientRect();
      const last = lines[lines.length - 1];
      if (last && (box.width === 0 || Math.abs(last.box.top - box.top) < 4))
        Object.assign(last, {
          text: last.text + letter,
          right: Math.max(last.right, box.right),
          left: box.width ? Math.min(last.left, box.left) : last.left,
        });
      else if (box.width > 0 && letter.trim()) lines.push({ text: letter, box, left: box.left, right: box.right });
    }
    const boxOf = ({ box, left, right }) => ({
      left,
      right,
      top: box.top,
      bottom: box.bottom,
      width: right - left,
      height: box.height,
    });
    return lines
      .filter((one) => inSight(boxOf(one), clip))
      .map((one) => this.line(one.text.trimEnd(), boxOf(one), style));
  }

  line(text, box, style) {
    const { x, y, height } = this.place(box);
    return line(text, x, y + height * 0.76, style);
  }
}

const inSight = (box, clip) =>
  box.width > 0 &&
  box.height > 0 &&
  box.right > clip.left &&
  box.left < clip.right &&
  box.bottom > clip.top &&
  box.top < clip.bottom;

const overlap = (a, b) => ({
  left: Math.max(a.left, b.left),
  right: Math.min(a.right, b.right),
  top: Math.max(a.top, b.top),
  bottom: Math.min(a.bottom, b.bottom),
});

// Text without what XML forbids: control characters, lone surrogates.
const proper = (text) => text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|\p{Surrogate}/gu, "\ufffd");

function line(text, x, y, style) {
  return shape(
    "text",
    {
      x,
      y,
      fill: style.color,
      "font-size": style.fontSize,
      "font-weight": style.fontWeight,
      "font-style": style.fontStyle,
      "text-decoration": style.textDecorationLine === "line-through" ? "line-through" : null,
      "xml:space": "preserve",
      "font-family": style.fontFamily.includes("mono") ? "monospace" : null,
    },
    proper(text),
  );
}

// CSS variables of colours are replaced by their values.
function inline(from, to) {
  const style = getComputedStyle(from);
  for (const name of ["fill", "stroke"])
    if (from.hasAttribute(name)) to.setAttribute(name, from.getAttribute(name) === "none" ? "none" : style[name]);
  [...from.children].forEach((child, i) => inline(child, to.children[i]));
}

// The whole view, also what is drawn only when it becomes visible.
async function drawn(view) {
  if (view.complete) await view.complete();
  view.node.classList.add("saving"); // what sticks to the screen, or scrolls in it, is laid out in full
  const { svg } = new Drawing(view.node);
  view.node.classList.remove("saving");
  return svg;
}

const asXml = (svg) => new XMLSerializer().serializeToString(svg);

async function saveSvg(view, name) {
  download(`${name}.svg`, new Blob([asXml(await drawn(view))], { type: "image/svg+xml" }));
}

async function savePng(view, name) {
  const svg = await drawn(view);
  const [width, height] = [Number(svg.getAttribute("width")), Number(svg.getAttribute("height"))];
  // At most what a canvas can hold.
  const scale = Math.min(2, Math.sqrt(6e7 / (width * height)), 16000 / Math.max(width, height));
  const image = new Image(width, height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(asXml(svg))}`;
  await image.decode();
  const canvas = element("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error("this view is too large for a PNG; save it as SVG");
  download(`${name}.png`, blob);
}
