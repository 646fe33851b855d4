// The current view as a picture: what is on the screen, drawn again as SVG; and that as PNG.

function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Walk what is shown: backgrounds and borders become rectangles, text becomes text, canvases become images.
function drawing(root) {
  const frame = root.getBoundingClientRect();
  const [width, height] = [Math.ceil(Math.max(frame.width, root.scrollWidth)), Math.ceil(Math.max(frame.height, root.scrollHeight))];
  const made = [shape("rect", { width, height, fill: getComputedStyle(document.body).backgroundColor })];
  const seen = (box, clip) => box.width > 0 && box.height > 0 && box.right > clip.left && box.left < clip.right && box.bottom > clip.top && box.top < clip.bottom;
  const walk = (node, clip) => {
    if (node.nodeType === Node.TEXT_NODE) return void made.push(...written(node, frame, clip, seen));
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden" || style.opacity === "0") return;
    const box = node.getBoundingClientRect();
    if (style.display !== "contents" && !seen(box, clip)) return;
    const place = { x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height };
    if (node instanceof HTMLCanvasElement) {
      const sharp = style.imageRendering === "pixelated" ? "pixelated" : null;
      return void made.push(shape("image", { ...place, href: node.toDataURL(), preserveAspectRatio: "none", "image-rendering": sharp }));
    }
    if (node instanceof SVGSVGElement) {
      const copy = node.cloneNode(true);
      inline(node, copy);
      for (const [name, value] of Object.entries(place)) copy.setAttribute(name, value);
      copy.setAttribute("color", style.color);
      return void made.push(copy);
    }
    const paper = style.backgroundColor;
    const edge = parseFloat(style.borderTopWidth) > 0 && style.borderTopStyle !== "none" ? style.borderTopColor : "none";
    if ((paper !== "rgba(0, 0, 0, 0)" && paper !== "transparent") || edge !== "none") made.push(shape("rect", { ...place, rx: parseFloat(style.borderTopLeftRadius) || 0, fill: paper === "rgba(0, 0, 0, 0)" ? "none" : paper, stroke: edge }));
    if (node instanceof HTMLSelectElement || node instanceof HTMLInputElement) {
      const said = node instanceof HTMLSelectElement ? (node.selectedOptions[0] || {}).textContent || "" : node.type === "checkbox" ? (node.checked ? "☑" : "☐") : node.type === "range" ? "" : node.value;
      return void made.push(line(said, place.x + 6, place.y + place.height * 0.7, style));
    }
    const hides = style.overflowX !== "visible" || style.overflowY !== "visible";
    const inner = hides && node !== root ? overlap(clip, box) : clip;
    for (const child of node.childNodes) walk(child, inner);
  };
  walk(root, { left: -1e9, right: 1e9, top: -1e9, bottom: 1e9 });
  return shape("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif" }, made);
}

const overlap = (a, b) => ({ left: Math.max(a.left, b.left), right: Math.min(a.right, b.right), top: Math.max(a.top, b.top), bottom: Math.min(a.bottom, b.bottom) });

function line(text, x, y, style) {
  return shape("text", { x, y, fill: style.color, "font-size": style.fontSize, "font-weight": style.fontWeight, "xml:space": "preserve", "font-family": style.fontFamily.includes("mono") ? "monospace" : null }, text);
}

// A text node, a line of the screen at a time.
function written(node, frame, clip, seen) {
  const text = node.nodeValue;
  if (!text.trim()) return [];
  const style = getComputedStyle(node.parentElement);
  const rangeOf = document.createRange();
  rangeOf.selectNodeContents(node);
  const boxes = [...rangeOf.getClientRects()];
  if (boxes.length <= 1) return boxes.filter((box) => seen(box, clip)).map((box) => line(text.trim(), box.left - frame.left, box.bottom - frame.top - box.height * 0.24, style));
  const lines = [];
  for (let i = 0; i < text.length; i++) {
    rangeOf.setStart(node, i);
    rangeOf.setEnd(node, i + 1);
    const box = rangeOf.getBoundingClientRect();
    const last = lines[lines.length - 1];
    if (last && Math.abs(last.box.top - box.top) < 4) last.text += text[i];
    else lines.push({ text: text[i], box });
  }
  return lines.filter(({ box }) => seen(box, clip)).map(({ text: said, box }) => line(said, box.left - frame.left, box.bottom - frame.top - box.height * 0.24, style));
}

// Colours that are names in the page's style are written out.
function inline(from, to) {
  const style = getComputedStyle(from);
  for (const name of ["fill", "stroke"]) if (from.hasAttribute(name)) to.setAttribute(name, from.getAttribute(name) === "none" ? "none" : style[name]);
  [...from.children].forEach((child, i) => inline(child, to.children[i]));
}

const written_out = (svg) => new XMLSerializer().serializeToString(svg);

function saveSvg(root, name) {
  download(`${name}.svg`, new Blob([written_out(drawing(root))], { type: "image/svg+xml" }));
}

async function savePng(root, name) {
  const svg = drawing(root);
  const [width, height] = [Number(svg.getAttribute("width")), Number(svg.getAttribute("height"))];
  const scale = Math.min(2, Math.sqrt(6e7 / (width * height)), 16000 / Math.max(width, height)); // what a canvas can hold
  const image = new Image(width, height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(written_out(svg))}`;
  await image.decode();
  const canvas = element("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error("this view is too large for a PNG; save it as SVG");
  download(`${name}.png`, blob);
}
