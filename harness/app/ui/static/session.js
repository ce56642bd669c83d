// The session of this tab: the same after a reload, another one in every other tab.

import { request } from "./api.js";

const KEY = "session";
const LOCK_MILLISECONDS = 1500;
const ANSWER_MILLISECONDS = 300;

export async function openSession() {
  const known = sessionStorage.getItem(KEY);
  if (known && (await hold(known))) {
    try {
      return await request("GET", `/api/sessions/${known}`);
    } catch {
      // The server was started again.
    }
  }
  const state = await request("POST", "/api/sessions");
  sessionStorage.clear();
  sessionStorage.setItem(KEY, state.session);
  await hold(state.session);
  return state;
}

// Whether no other tab has this session; a tab that is duplicated takes a copy of the number along.
function hold(session) {
  if (!navigator.locks) return holdByAsking(session);
  const signal = AbortSignal.timeout(LOCK_MILLISECONDS);
  return new Promise((resolve) => {
    const forever = () => {
      resolve(true);
      return new Promise(() => {});
    };
    navigator.locks.request(`sam3-tvm ${session}`, { signal }, forever).catch(() => resolve(false));
  });
}

// The same without locks, which browsers have by HTTPS and on this machine alone: asks whether a tab says that it has it.
function holdByAsking(session) {
  const channel = new BroadcastChannel(`sam3-tvm ${session}`);
  return new Promise((resolve) => {
    const waiting = setTimeout(() => {
      channel.onmessage = ({ data }) => data === "whose?" && channel.postMessage("mine");
      resolve(true);
    }, ANSWER_MILLISECONDS);
    channel.onmessage = ({ data }) => {
      if (data !== "mine") return;
      clearTimeout(waiting);
      channel.close();
      resolve(false);
    };
    channel.postMessage("whose?");
  });
}

export function remember(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Without room, a reload forgets the prompt alone.
  }
}

export function recall(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}
