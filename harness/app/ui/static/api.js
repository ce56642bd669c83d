// Requests to the server: an answer, or an error whose message is one sentence.

const SILENT = "The server does not answer; look at the terminal in which `sam3-tvm ui` runs, and try again.";

export class Refused extends Error {}

export async function request(method, path, body) {
  const options = { method };
  if (body instanceof Blob) {
    options.body = body;
    options.headers = { "Content-Type": "application/octet-stream" };
  } else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error(SILENT);
  }
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  let sentence = text;
  try {
    sentence = JSON.parse(text).error ?? text;
  } catch {
    // A refusal is plain text.
  }
  throw new Refused(sentence.trim() || `The server answered ${response.status}.`);
}
