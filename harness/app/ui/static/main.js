// The page: what the user does becomes a state, a state becomes a question, and its answer is shown.

import { Refused, request } from "./api.js";
import { byId } from "./dom.js";
import { showFound, showImages, showKept, showParts } from "./lists.js";
import { say, watched } from "./progress.js";
import { EMPTY, cleared, forNext, isEmpty, parts, question, withBox, withPoint, withText } from "./prompt.js";
import { openSession, recall, remember } from "./session.js";
import { Stage } from "./stage.js";

const HINTS = {
  object:
    "Click on the object. To exclude a place, click with Shift, with the right button, or after “It is not here”. " +
    "Drag to draw a box. Click on a point to remove it.",
  kinds:
    "Type what to look for, or drag boxes around examples. To exclude something, drag with Shift, with the right " +
    "button, or after “It is not here”.",
};
const IMAGES_MILLISECONDS = 500;

let model;
let root; // of the session's URLs
let photograph = null;
let kept = [];
let states = [EMPTY]; // the last one is shown
let good = { state: EMPTY, answer: null }; // the last state that was answered
let uploads = 0;
let changes = 0;
let isAsking = false;

const current = () => states[states.length - 1];
const isPositive = () => document.querySelector("input[name=sign]:checked").value === "1";

const stage = new Stage({
  click: (x, y, isOther) => {
    if (current().mode !== "object") return say(HINTS.kinds);
    return change(refining(withPoint(current(), { x, y, label: Number(isPositive() !== isOther) })));
  },
  drag: (box, isOther) => change(refining(withBox(current(), box, Number(isPositive() !== isOther)))),
  removePoint: (index) => {
    const state = current();
    change(refining({ ...state, points: state.points.filter((_, other) => other !== index) }));
  },
});

function refining(state) {
  if (state.mode !== "object" || !byId("refine").checked || !good.answer?.isOne) return { ...state, refines: null };
  return { ...state, refines: good.answer.answer };
}

function complain(error) {
  byId("error-text").textContent = error.message;
  byId("error").hidden = false;
}

function calm() {
  byId("error").hidden = true;
}

// Shows a state, and asks what it says.
function change(state) {
  states = [...states, state];
  asked();
}

function asked() {
  changes += 1;
  show();
  remember("prompt", { photograph: photograph?.key, states });
  if (!isAsking) askUntilAnswered();
}

// One question at a time; of those that come meanwhile, the last one counts.
async function askUntilAnswered() {
  isAsking = true;
  let answered = -1;
  while (answered !== changes) {
    answered = changes;
    await ask(current(), answered);
  }
  isAsking = false;
}

async function ask(state, number) {
  if (!photograph) {
    say("Choose a photograph first.");
    return;
  }
  if (isEmpty(state)) {
    good = { state, answer: null };
    show();
    return;
  }
  const { key } = photograph;
  const [path, body] = question(state, key);
  try {
    const answer = await watched(root, request("POST", `${root}/${path}`, body));
    if (photograph.key !== key) return;
    calm();
    good = { state, answer: { ...answer, isOne: state.mode === "object", kept: new Set() } };
    say(summary(good.answer));
  } catch (error) {
    if (photograph.key !== key) return;
    complain(error);
    say("");
    // What the model refuses is taken back, so that masks and marks belong together.
    if (error instanceof Refused && number === changes) states = back(good.state);
  }
  show();
}

function back(state) {
  const place = states.lastIndexOf(state);
  return place < 0 ? [state] : states.slice(0, place + 1);
}

function summary({ objects, isOne }) {
  if (isOne) return `One mask, score ${objects[0].score.toFixed(3)}.`;
  return objects.length === 1 ? "1 mask." : `${objects.length} masks.`;
}

function show() {
  const state = current();
  const { answer } = good;
  const isObject = state.mode === "object";
  for (const input of document.querySelectorAll("input[name=mode]")) input.checked = input.value === state.mode;
  byId("text-form").hidden = byId("threshold-row").hidden = isObject;
  byId("refine-row").hidden = !isObject;
  byId("hint").textContent = HINTS[state.mode];
  byId("threshold").value = state.threshold;
  byId("threshold-value").textContent = state.threshold.toFixed(2);
  byId("undo").disabled = states.length < 2;
  byId("clear").disabled = isEmpty(state);
  showParts(parts(state), (without) => change(refining(without)));
  showFound(answer, root, keep);
  const left = answer ? answer.objects.length - answer.kept.size : 0;
  byId("keep-form").hidden = !left;
  byId("category").parentElement.previousElementSibling.hidden = byId("category").hidden = !answer?.isOne;
  byId("keep").textContent = answer?.isOne ? "Keep this mask" : `Keep all ${left}`;
  showKept(kept, root, drop);
  if (!photograph) return;
  const boxes = isObject ? [state.box].filter(Boolean).map((box) => ({ box, label: 1 })) : state.boxes;
  stage.mark(isObject ? state.points : [], boxes);
  stage.paint([...kept.filter((object) => object.photograph === photograph.key), ...(answer?.objects ?? [])]);
}

// Keeps masks of the last answer; one object makes room for the next.
async function keep(indices) {
  const { answer } = good;
  const category = answer.isOne ? byId("category").value : null;
  try {
    ({ kept } = await request("POST", `${root}/kept`, { answer: answer.answer, indices, category }));
  } catch (error) {
    complain(error);
    return;
  }
  calm();
  for (const index of indices) answer.kept.add(index);
  if (answer.isOne) change(cleared(current()));
  else show();
  say(kept.length === 1 ? "1 mask is kept." : `${kept.length} masks are kept.`);
}

async function drop(number) {
  try {
    ({ kept } = await request("DELETE", `${root}/kept/${number}`));
    calm();
  } catch (error) {
    complain(error);
  }
  show();
}

// Shows a photograph that a request chooses, and has it encoded.
async function choose(sending) {
  uploads += 1;
  const number = uploads;
  say("Reading the photograph…");
  let chosen;
  try {
    chosen = await sending();
  } catch (error) {
    if (number === uploads) {
      say("");
      complain(error);
    }
    return;
  }
  if (number !== uploads) return;
  calm();
  open(chosen, [forNext(current())]);
  await encode(number);
  if (number === uploads && !isEmpty(current())) asked();
}

function open(chosen, withStates) {
  photograph = chosen;
  states = withStates;
  good = { state: states[0], answer: null };
  byId("empty").hidden = true;
  byId("under").hidden = false;
  byId("name").textContent = `${chosen.name}, ${chosen.width} × ${chosen.height}`;
  stage.show(chosen);
  for (const button of document.querySelectorAll("#image-list button")) {
    button.setAttribute("aria-pressed", String(button.textContent === chosen.name));
  }
  remember("prompt", { photograph: chosen.key, states });
  show();
}

async function encode(number) {
  say("Encoding the photograph…");
  try {
    await watched(root, request("POST", `${root}/encode?photograph=${photograph.key}`));
    if (number === uploads && !isAsking) say("Ready.");
  } catch (error) {
    if (number !== uploads) return;
    say("");
    complain(error);
  }
}

const upload = (file) =>
  choose(() => request("PUT", `${root}/photograph?name=${encodeURIComponent(file.name)}`, file));

async function listImages() {
  const { images, unchecked } = await request("GET", "/api/images");
  showImages(images, photograph?.name, (name) =>
    choose(() => request("PUT", `${root}/image?name=${encodeURIComponent(name)}`)),
  );
  if (unchecked) setTimeout(() => listImages().catch(complain), IMAGES_MILLISECONDS);
}

function listen() {
  for (const button of document.querySelectorAll(".choose")) {
    button.onclick = () => byId("file").click();
    button.disabled = false;
  }
  byId("file").onchange = ({ target }) => {
    if (target.files.length) upload(target.files[0]);
    target.value = "";
  };
  const over = (event, isOver) => {
    event.preventDefault();
    byId("drop").classList.toggle("over", isOver);
  };
  document.addEventListener("dragover", (event) => over(event, true));
  document.addEventListener("dragleave", (event) => over(event, false));
  document.addEventListener("drop", (event) => {
    over(event, false);
    if (event.dataTransfer.files.length) upload(event.dataTransfer.files[0]);
  });
  for (const input of document.querySelectorAll("input[name=mode]")) {
    input.onchange = () => change({ ...current(), mode: input.value });
  }
  byId("text-form").onsubmit = (event) => {
    event.preventDefault();
    const text = byId("text").value.trim();
    byId("text").value = "";
    if (text) change(withText(current(), text));
  };
  byId("threshold").oninput = ({ target }) => {
    byId("threshold-value").textContent = Number(target.value).toFixed(2);
  };
  byId("threshold").onchange = ({ target }) => change({ ...current(), threshold: Number(target.value) });
  byId("undo").onclick = undo;
  byId("clear").onclick = () => change(cleared(current()));
  byId("zoom").oninput = ({ target }) => {
    stage.zoom = Number(target.value);
    stage.fit();
  };
  byId("keep-form").onsubmit = (event) => {
    event.preventDefault();
    keep(good.answer.objects.map((_, index) => index).filter((index) => !good.answer.kept.has(index)));
  };
  byId("dismiss").onclick = calm;
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "z" && event.target.tagName !== "INPUT") undo();
  });
}

function undo() {
  if (states.length < 2) return;
  states = states.slice(0, -1);
  asked();
}

async function start() {
  history.replaceState(null, "", location.pathname); // the token is a cookie from now on
  model = await request("GET", "/api/model");
  byId("model").textContent = `${model.name}: ${model.scale} scale, ${model.target}, ${model.precision}`;
  byId("untrained").textContent = model.note ?? "";
  byId("untrained").hidden = !model.note;
  byId("mode").hidden = !(model.clicks && model.boxes);
  byId("category").value = "object";
  const first = { ...EMPTY, mode: model.clicks ? "object" : "kinds", threshold: model.threshold };
  states = [first];
  good = { state: first, answer: null };
  const session = await openSession();
  root = `/api/sessions/${session.session}`;
  kept = session.kept;
  listen();
  if (model.folder) {
    byId("images").hidden = false;
    await listImages();
  }
  if (!session.photograph) {
    show();
    return;
  }
  const before = recall("prompt");
  open(session.photograph, before?.photograph === session.photograph.key ? before.states : [first]);
  await encode(uploads);
  asked();
}

start().catch(complain);
