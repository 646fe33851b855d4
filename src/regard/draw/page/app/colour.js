// Colours in even steps of lightness, so that maps read the same in grey and with colour blindness. Computed in OKLab.

function oklab(lightness, a, b) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const c = clamp(x, 0, 1);
    return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
  });
}

// A ramp through points [lightness, a, b], at even distances.
function ramp(points, steps = 256) {
  return range(steps).map((i) => {
    const t = (i / (steps - 1)) * (points.length - 1);
    const k = Math.min(Math.floor(t), points.length - 2);
    return oklab(...range(3).map((axis) => points[k][axis] + (t - k) * (points[k + 1][axis] - points[k][axis])));
  });
}

const RAMPS = {
  light: ramp([
    [0.995, 0, 0],
    [0.8, -0.045, -0.06],
    [0.6, -0.04, -0.125],
    [0.42, -0.005, -0.15],
    [0.25, 0.02, -0.09],
  ]),
  dark: ramp([
    [0.2, 0, -0.01],
    [0.4, 0.02, -0.13],
    [0.58, 0.04, -0.08],
    [0.77, 0.04, 0.08],
    [0.96, -0.02, 0.1],
  ]),
};
// From negative (orange) to positive (blue), as the bars have it.
const DIVERGING = {
  light: ramp([
    [0.48, 0.1, 0.1],
    [0.75, 0.07, 0.1],
    [0.985, 0, 0],
    [0.72, -0.05, -0.09],
    [0.42, -0.02, -0.15],
  ]),
  dark: ramp([
    [0.82, 0.05, 0.13],
    [0.55, 0.08, 0.1],
    [0.22, 0, 0],
    [0.5, -0.02, -0.13],
    [0.78, -0.06, -0.11],
  ]),
};

// A colour and a sign for each role; the sign tells where the colour does not.
const ROLES = {
  induction: ["#cc3311", "I"],
  duplicate: ["#ee7733", "D"],
  previous: ["#0077bb", "←"],
  next: ["#33bbee", "→"],
  itself: ["#009988", "•"],
  separator: ["#aa4499", "S"],
  punctuation: ["#882255", "P"],
  first: ["#777777", "1"],
  local: ["#117733", "L"],
  "long-range": ["#999933", "R"],
  broad: ["#ddaa33", "B"],
  "same word": ["#44aa99", "W"],
  related: ["#bb5566", "M"],
  retrieval: ["#994455", "F"],
  sink: ["#888888", "_"],
  "resting only": ["#999999", "0"],
};
const OFFSET = ["#4477aa", "±"]; // "offset -3" and the like
const CLASS = ["#aa7744", "C"]; // a class of words: one word in the plural
const RELATION = ["#663399", "§"]; // a relation of syntax: "determiner and noun"
function roleLook(role) {
  if (Object.hasOwn(ROLES, role)) return ROLES[role];
  if (role.startsWith("offset ")) return OFFSET;
  return role.includes(" ") ? RELATION : CLASS;
}
const roleColour = (role) => roleLook(role)[0];
const roleSign = (role) => roleLook(role)[1];

// Black or white, whichever has more contrast with a colour "#rrggbb" (relative luminance of WCAG).
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}

const theme = () => document.documentElement.dataset.theme; // "light" or "dark": set before anything is drawn
const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// From a value from 0 to 1 to a step of the ramp: the root makes small weights visible.
const SCALES = { linear: (x) => x, root: Math.sqrt };

function colourOf(share, scale = "root") {
  return css(RAMPS[theme()][Math.round(255 * SCALES[scale](clamp(share, 0, 1)))]);
}

const packedRamps = new Map();

// The colours of a ramp as the pixels of a canvas.
function packedRamp(colours) {
  if (!packedRamps.has(colours))
    packedRamps.set(
      colours,
      Uint32Array.from(colours, ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r),
    );
  return packedRamps.get(colours);
}

// A canvas of values (rows, cols), a pixel each: from 0 to `top`, or from -top to top if `signed`. A canvas that is given
// is used again: a new one takes longer than to paint it.
function painted(values, rows, cols, top, { signed = false, scale = "root", canvas = element("canvas") } = {}) {
  Object.assign(canvas, { width: Math.max(cols, 1), height: Math.max(rows, 1) });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const packed = packedRamp((signed ? DIVERGING : RAMPS)[theme()]);
  const curve = SCALES[scale];
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < rows * cols; i++) {
    const share = top > 0 ? values[i] / top : 0;
    const step = signed
      ? 127.5 + 127.5 * Math.sign(share) * curve(Math.min(Math.abs(share), 1))
      : 255 * curve(clamp(share, 0, 1));
    pixels[i] = packed[Math.round(step)];
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
