// What the model does for this tab, or whom it waits for, while a request to it is under way.

import { request } from "./api.js";
import { byId } from "./dom.js";

const EVERY_MILLISECONDS = 250;

const SENTENCES = {
  encoding: () => "Encoding the photograph…",
  asking: () => "Looking for masks…",
  waiting: (ahead) => `Waiting for another tab: ${ahead} ${ahead === 1 ? "request" : "requests"} first.`,
};

export function say(sentence) {
  if (byId("status").textContent !== sentence) byId("status").textContent = sentence;
}

// Waits for a request, and says meanwhile how it goes.
export async function watched(root, running) {
  const bar = byId("progress");
  let isOver = false;
  const watch = async () => {
    while (!isOver) {
      const { doing, ahead, seconds, expected } = await request("GET", `${root}/doing`).catch(() => ({}));
      if (isOver) break;
      if (doing) {
        say(SENTENCES[doing](ahead));
        bar.hidden = doing === "asking";
        if (doing === "encoding" && expected) bar.value = Math.min(0.97, seconds / expected);
        else bar.removeAttribute("value");
      }
      await new Promise((resolve) => setTimeout(resolve, EVERY_MILLISECONDS));
    }
  };
  watch();
  try {
    return await running;
  } finally {
    isOver = true;
    bar.hidden = true;
  }
}
