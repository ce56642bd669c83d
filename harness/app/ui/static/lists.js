// The lists beside the photograph: parts of the prompt, masks that were found, masks that are kept, images.

import { byId, element } from "./dom.js";

export function showParts(parts, onRemove) {
  const items = parts.map(({ text, label, without }) =>
    element(
      "li",
      {},
      element("span", { textContent: text }),
      element("button", { type: "button", "aria-label": label, textContent: "×", onclick: () => onRemove(without) }),
    ),
  );
  byId("parts").replaceChildren(...items);
}

export function showFound(answer, root, onKeep) {
  const objects = answer?.objects ?? [];
  const items = objects.map((object, index) => {
    const keep = { type: "button", disabled: answer.kept.has(index), onclick: () => onKeep([index]) };
    return row(
      object,
      share(object),
      answer.isOne ? "" : element("button", { ...keep, textContent: keep.disabled ? "Kept" : "Keep" }),
      download(`${root}/answers/${answer.answer}/${index}.png`, object),
    );
  });
  byId("found-list").replaceChildren(...items);
  byId("found-count").textContent = answer ? `${objects.length}` : "";
  byId("notes").replaceChildren(...(answer?.notes ?? []).map((note) => element("p", { textContent: note })));
}

export function showKept(kept, root, onRemove) {
  const items = kept.map((object) =>
    row(
      object,
      object.name,
      download(`${root}/kept/${object.number}.png`, object),
      element("button", {
        type: "button",
        textContent: "Remove",
        "aria-label": `Remove ${object.category} in ${object.name}`,
        onclick: () => onRemove(object.number),
      }),
    ),
  );
  byId("kept-list").replaceChildren(...items);
  byId("kept-count").textContent = kept.length ? `${kept.length}` : "";
  byId("kept-empty").hidden = kept.length > 0;
  byId("coco").hidden = !kept.length;
  byId("coco").href = `${root}/annotations.json`;
}

export function showImages(images, shown, onChoose) {
  const items = images.map(({ name, problem }) =>
    problem
      ? element("li", { className: "problem", textContent: problem })
      : element(
          "li",
          {},
          element("button", {
            type: "button",
            textContent: name,
            "aria-pressed": String(name === shown),
            onclick: () => onChoose(name),
          }),
        ),
  );
  byId("image-list").replaceChildren(...items);
}

function row(object, small, ...actions) {
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = object.color;
  const what = element("span", { className: "what" }, `${object.category} `);
  what.append(element("b", { className: "score", textContent: object.score.toFixed(3) }));
  what.append(element("small", { textContent: small }));
  return element("li", { className: "object" }, swatch, what, ...actions);
}

function download(href, object) {
  return element("a", {
    className: "button",
    href,
    download: "",
    textContent: "PNG",
    "aria-label": `Download the mask of ${object.category}, score ${object.score.toFixed(3)}`,
  });
}

function share({ area, segmentation: { size } }) {
  return `${((area / (size[0] * size[1])) * 100).toFixed(1)} % of the photograph`;
}
