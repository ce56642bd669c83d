// The photograph with its masks and marks: clicks, drags and keys in pixels of the photograph, whatever its size on the screen.

import { byId, drawn } from "./dom.js";
import { paint } from "./masks.js";

const DRAG = 5; // pixels of the screen from which on a click is a drag
const REACH = 12; // and within which a click means a point that is there
const RADIUS = 8;
const STEP = 8;
const FAR = 40;

const scroll = byId("scroll");
const stage = byId("stage");
const marks = byId("marks");

export class Stage {
  // `on` has click(x, y, isOther), drag(box, isOther) and removePoint(index); isOther: with Shift or the right button.
  constructor(on) {
    this.on = on;
    this.size = null;
    this.points = [];
    this.boxes = [];
    this.cross = null;
    this.corner = null; // of a box that the keys draw
    this.pointer = null;
    this.zoom = 1;
    new ResizeObserver(() => this.fit()).observe(byId("drop"));
    marks.addEventListener("pointerdown", (event) => this.#down(event));
    marks.addEventListener("pointermove", (event) => this.#move(event));
    marks.addEventListener("pointerup", (event) => this.#up(event));
    marks.addEventListener("pointercancel", () => this.#release());
    marks.addEventListener("contextmenu", (event) => event.preventDefault());
    marks.addEventListener("keydown", (event) => this.#key(event));
    marks.addEventListener("blur", () => this.#forget());
  }

  show({ key, name, width, height }) {
    this.size = [width, height];
    this.cross = this.corner = null;
    marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    marks.setAttribute("aria-label", `${name}, ${width} by ${height} pixels`);
    const image = byId("photograph");
    image.src = `/api/photographs/${key}`;
    image.alt = name;
    scroll.hidden = false;
    this.paint([]);
    this.mark([], []);
    this.fit();
  }

  // Makes the photograph as large as there is room, times the zoom.
  fit() {
    if (!this.size) return;
    const [width, height] = this.size;
    const room = byId("drop").clientWidth;
    const tall = window.innerHeight * (window.innerWidth > 820 ? 0.74 : 0.58);
    const shown = Math.max(40, Math.min(room, (tall * width) / height)) * this.zoom;
    stage.style.width = `${shown}px`;
    stage.style.height = `${(shown * height) / width}px`;
    this.#draw();
  }

  paint(objects) {
    paint(byId("overlay"), this.size, objects);
  }

  mark(points, boxes) {
    this.points = points;
    this.boxes = boxes;
    this.#draw();
  }

  // Pixels of the photograph for one of the screen.
  get #unit() {
    return this.size[0] / (marks.getBoundingClientRect().width || this.size[0]);
  }

  #inside(x, y) {
    const fit = (value, most) => Math.round(Math.min(Math.max(value, 0), most) * 10) / 10;
    return [fit(x, this.size[0]), fit(y, this.size[1])];
  }

  #place(event) {
    const frame = marks.getBoundingClientRect();
    return this.#inside(
      ((event.clientX - frame.left) / frame.width) * this.size[0],
      ((event.clientY - frame.top) / frame.height) * this.size[1],
    );
  }

  #down(event) {
    if (event.button > 2 || event.button === 1 || !event.isPrimary) return;
    marks.setPointerCapture(event.pointerId);
    this.pointer = {
      at: this.#place(event),
      screen: [event.clientX, event.clientY],
      isOther: event.button === 2 || event.shiftKey || event.ctrlKey,
      end: null,
    };
  }

  #move(event) {
    const { pointer } = this;
    if (!pointer) return;
    const far = Math.hypot(event.clientX - pointer.screen[0], event.clientY - pointer.screen[1]) >= DRAG;
    if (far || pointer.end) pointer.end = this.#place(event);
    this.#draw();
  }

  #up(event) {
    const { pointer } = this;
    if (!pointer) return;
    this.#move(event);
    this.#release();
    if (pointer.end) this.on.drag(rectangle(pointer.at, pointer.end), pointer.isOther);
    else this.#click(pointer.at, pointer.isOther);
  }

  #release() {
    this.pointer = null;
    this.#draw();
  }

  #click([x, y], isOther) {
    const reach = REACH * this.#unit;
    const near = this.points.findLastIndex((point) => Math.hypot(point.x - x, point.y - y) <= reach);
    if (near >= 0) this.on.removePoint(near);
    else this.on.click(x, y, isOther);
  }

  #key(event) {
    if (!this.size || event.altKey || event.metaKey || event.ctrlKey) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const [width, height] = this.size;
    this.cross ??= [width / 2, height / 2];
    if (event.key in moves) {
      const step = (event.shiftKey ? FAR : STEP) * this.#unit;
      const [x, y] = moves[event.key];
      this.cross = this.#inside(this.cross[0] + x * step, this.cross[1] + y * step);
    } else if (event.key === "Enter") {
      this.#click(this.#inside(...this.cross), event.shiftKey);
    } else if (event.key.toLowerCase() === "b") {
      const [corner, end] = [this.corner, this.#inside(...this.cross)];
      this.corner = corner ? null : end;
      if (corner) this.on.drag(rectangle(corner, end), event.shiftKey);
    } else if (event.key === "Escape") {
      this.#forget();
    } else {
      return;
    }
    event.preventDefault();
    this.#draw();
  }

  #forget() {
    this.cross = this.corner = null;
    this.#draw();
  }

  #draw() {
    if (!this.size) return;
    const unit = this.#unit;
    const boxes = this.boxes.flatMap(({ box, label }) => frame(box, label));
    if (this.pointer?.end) boxes.push(...frame(rectangle(this.pointer.at, this.pointer.end), !this.pointer.isOther));
    if (this.corner) boxes.push(...frame(rectangle(this.corner, this.cross), true));
    const points = this.points.flatMap(({ x, y, label }) => disc(x, y, label, unit));
    marks.replaceChildren(...boxes, ...points, ...(this.cross ? cross(this.cross, 14 * unit) : []));
  }
}

function rectangle([x0, y0], [x1, y1]) {
  return [Math.min(x0, x1), Math.min(y0, y1), Math.max(x0, x1), Math.max(y0, y1)];
}

function frame([x0, y0, x1, y1], isPositive) {
  const place = { x: x0, y: y0, width: x1 - x0, height: y1 - y0 };
  const kind = isPositive ? "positive" : "negative";
  return [drawn("rect", { ...place, class: "edge" }), drawn("rect", { ...place, class: `box ${kind}` })];
}

function disc(x, y, label, unit) {
  const arm = RADIUS * 0.5 * unit;
  const kind = label ? "positive" : "negative";
  const lines = [drawn("line", { x1: x - arm, x2: x + arm, y1: y, y2: y, class: "sign" })];
  if (label) lines.push(drawn("line", { x1: x, x2: x, y1: y - arm, y2: y + arm, class: "sign" }));
  return [drawn("circle", { cx: x, cy: y, r: RADIUS * unit, class: kind }), ...lines];
}

function cross([x, y], arm) {
  return [
    drawn("line", { x1: x - arm, x2: x + arm, y1: y, y2: y, class: "cross" }),
    drawn("line", { x1: x, x2: x, y1: y - arm, y2: y + arm, class: "cross" }),
  ];
}
