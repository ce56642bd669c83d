// Masks in COCO's compressed run-length encoding: decoded, and painted over the photograph.

const LONGEST_SIDE = 1600; // of the overlay; masks of larger photographs are painted smaller
const OPACITY = 107; // of 255, as of the overlays that `sam3-tvm segment` writes
const scaled = new WeakMap();

// The lengths of the runs, of zeros first (rleFrString of COCO's maskApi.c).
export function runs(counts) {
  const lengths = [];
  let place = 0;
  while (place < counts.length) {
    let value = 0;
    let shift = 0;
    let code;
    do {
      code = counts.charCodeAt(place) - 48;
      value |= (code & 0x1f) << shift;
      place += 1;
      shift += 5;
    } while (code & 0x20);
    if (code & 0x10) value |= -1 << shift;
    if (lengths.length > 2) value += lengths[lengths.length - 2];
    lengths.push(value);
  }
  return lengths;
}

// The pixels of a mask, column after column.
export function decode({ size: [height, width], counts }) {
  const pixels = new Uint8Array(width * height);
  let place = 0;
  runs(counts).forEach((length, index) => {
    if (index % 2) pixels.fill(1, place, place + length);
    place += length;
  });
  return pixels;
}

// Paints objects over each other, what scores highest on top: a tint inside, an opaque edge.
export function paint(canvas, size, objects) {
  const [width, height] = overlaySize(size);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const target = new Uint32Array(image.data.buffer);
  const line = Math.max(1, Math.round(Math.hypot(width, height) / 500));
  for (const object of [...objects].sort((one, other) => one.score - other.score)) {
    const mask = shrunk(object, width, height);
    const tint = packed(object.color, OPACITY);
    const edge = packed(object.color, 255);
    for (let y = 0; y < height; y += 1) {
      for (let x = 0, at = y * width; x < width; x += 1, at += 1) {
        if (mask[at]) target[at] = isEdge(mask, x, y, width, height, line) ? edge : tint;
      }
    }
  }
  context.putImageData(image, 0, 0);
}

function overlaySize([width, height]) {
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

// A mask's pixels in the overlay's size, row after row.
function shrunk(object, width, height) {
  const known = scaled.get(object);
  if (known) return known;
  const [rows, columns] = object.segmentation.size;
  const pixels = decode(object.segmentation);
  const mask = new Uint8Array(width * height);
  for (let x = 0; x < width; x += 1) {
    const column = Math.floor(((x + 0.5) * columns) / width) * rows;
    for (let y = 0; y < height; y += 1) {
      mask[y * width + x] = pixels[column + Math.floor(((y + 0.5) * rows) / height)];
    }
  }
  scaled.set(object, mask);
  return mask;
}

function isEdge(mask, x, y, width, height, line) {
  const at = y * width + x;
  return (
    (x >= line && !mask[at - line]) ||
    (x + line < width && !mask[at + line]) ||
    (y >= line && !mask[at - line * width]) ||
    (y + line < height && !mask[at + line * width])
  );
}

// A colour as ImageData has it: R, G, B, A in this order in memory.
function packed(color, alpha) {
  const bytes = new Uint8Array([1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16)).concat(alpha));
  return new Uint32Array(bytes.buffer)[0];
}
