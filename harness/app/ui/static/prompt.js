// What is asked: states that are never changed, and how one state becomes the next.

export const EMPTY = {
  mode: "object",
  points: [], // {x, y, label}
  box: null, // [x0, y0, x1, y1]
  refines: null, // number of the answer whose mask is refined
  texts: [],
  boxes: [], // {box, label}
  threshold: 0.5,
};

export const isEmpty = (state) =>
  state.mode === "object" ? !state.points.length && !state.box : !state.texts.length && !state.boxes.length;

export const cleared = (state) => ({ ...EMPTY, mode: state.mode, threshold: state.threshold });

// What is asked of the next photograph: the same texts.
export const forNext = (state) => ({ ...cleared(state), texts: state.texts });

export const withPoint = (state, point) => ({ ...state, points: [...state.points, point] });

export const withBox = (state, box, label) =>
  state.mode === "object" ? { ...state, box } : { ...state, boxes: [...state.boxes, { box, label }] };

export const withText = (state, text) =>
  state.texts.includes(text) ? state : { ...state, texts: [...state.texts, text] };

// The parts of a state, each with a description and the state without it.
export function parts(state) {
  const round = (box) => box.map((value) => Math.round(value)).join(", ");
  if (state.mode === "object") {
    const points = state.points.map(({ x, y, label }, index) => ({
      text: `${label ? "+" : "−"} ${x}, ${y}`,
      label: `Remove point ${index + 1}, ${label ? "on" : "beside"} the object`,
      without: { ...state, points: state.points.filter((_, other) => other !== index) },
    }));
    if (!state.box) return points;
    return [{ text: `Box ${round(state.box)}`, label: "Remove the box", without: { ...state, box: null } }, ...points];
  }
  const texts = state.texts.map((text) => ({
    text,
    label: `Remove the text ${text}`,
    without: { ...state, texts: state.texts.filter((other) => other !== text) },
  }));
  const boxes = state.boxes.map(({ box, label }, index) => ({
    text: `${label ? "+" : "−"} box ${round(box)}`,
    label: `Remove box ${index + 1}`,
    without: { ...state, boxes: state.boxes.filter((_, other) => other !== index) },
  }));
  return [...texts, ...boxes];
}

// The path and body of the request that asks what a state says.
export function question(state, photograph) {
  if (state.mode === "object") {
    return [
      "object",
      {
        photograph,
        points: state.points.map(({ x, y }) => [x, y]),
        labels: state.points.map(({ label }) => label),
        box: state.box,
        refines: state.refines,
      },
    ];
  }
  return [
    "kinds",
    {
      photograph,
      texts: state.texts,
      boxes: state.boxes.map(({ box }) => box),
      box_labels: state.boxes.map(({ label }) => label),
      threshold: state.threshold,
    },
  ];
}
