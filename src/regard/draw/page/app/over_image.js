// What one token looks at in the picture that the model was shown: a square for each patch.

const OVER = [204, 51, 17]; // as in figures: the picture is grey, weights are coloured
const OVER_SIDE = 480; // pixels of the longer side

class OverImage {
  constructor() {
    this.canvas = element("canvas", { id: "over-image", role: "img" });
    this.words = element("figcaption", { id: "over-words" });
    this.node = element("figure", { class: "over-image" }, this.canvas, this.words);
  }

  // Whether there is a picture, and every weight of the layer.
  static fits(layer) {
    return Boolean(layer.run.image && layer.grid && layer.map && !layer.pooled);
  }

  async show(layer, head, scale) {
    this.grey = await greyPicture(layer.run.image);
    Object.assign(this, { layer, head, scale });
  }

  // Draw the weights of a query; by default of the first token of an image encoder, or of the last of a text.
  mark(token) {
    const { layer, head, canvas } = this;
    const { rows, cols, first } = layer.grid;
    const text = first + rows * cols < layer.m;
    const query = token >= 0 && token < layer.n ? token : text ? layer.n - 1 : 0;
    const weights = range(rows * cols).map((i) => layer.cell(head, query, this.position(i)).value);
    const [most, sum] = [largest(weights), weights.reduce((a, b) => a + b, 0)];
    Object.assign(canvas, { width: this.grey.width, height: this.grey.height });
    const context = canvas.getContext("2d");
    context.drawImage(this.grey, 0, 0);
    const [wide, high] = [canvas.width / cols, canvas.height / rows];
    const box = (i) => [(i % cols) * wide, Math.floor(i / cols) * high, wide, high];
    weights.forEach((weight, i) => {
      const share = most > 0 ? SCALES[this.scale](weight / most) : 0;
      context.fillStyle = `rgba(${OVER.join(",")},${0.92 * share})`;
      context.fillRect(...box(i));
    });
    const own = range(rows * cols).find((i) => this.position(i) === query);
    if (own !== undefined) {
      Object.assign(context, { strokeStyle: "#000000", lineWidth: 2 });
      context.strokeRect(...box(own));
    }
    const name = isolated(short(layer.queries.tokens[query], 20));
    const shares = `${number(sum, 3)} of its attention is on the image, at most ${number(most, 3)} on one patch`;
    const said = `What “${name}” looks at: ${shares}.`;
    fill(this.words, said);
    canvas.setAttribute("aria-label", said);
    Object.assign(canvas.dataset, { query, sum, most });
  }

  // The key of patch i, counted row by row: in some image encoders patches come in squares.
  position(i) {
    const { cols, first, block } = this.layer.grid;
    const [row, col] = [Math.floor(i / cols), i % cols];
    const square = Math.floor(row / block) * (cols / block) + Math.floor(col / block);
    return first + square * block * block + (row % block) * block + (col % block);
  }
}

// The picture in light grey, on a canvas; made once.
async function greyPicture(image) {
  if (image.grey) return image.grey;
  const source = new Image();
  source.src = image.source;
  await source.decode();
  const scale = OVER_SIDE / Math.max(image.width, image.height);
  const canvas = element("canvas");
  canvas.width = Math.max(Math.round(image.width * scale), 1);
  canvas.height = Math.max(Math.round(image.height * scale), 1);
  const context = canvas.getContext("2d");
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [r, g, b] = pixels.data.subarray(i, i + 3);
    const grey = 255 - (255 - (0.299 * r + 0.587 * g + 0.114 * b)) * 0.5;
    pixels.data.fill(grey, i, i + 3);
  }
  context.putImageData(pixels, 0, 0);
  return (image.grey = canvas);
}
