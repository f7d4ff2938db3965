// The page's one line for what a person has to know or do.

import { $, button } from "./dom.js";

/** Shows a line, with buttons: {label: what it runs}. An error stays until it is dismissed or replaced. */
export function notify(text, actions = {}, { error = false } = {}) {
  const line = $("notice");
  const buttons = Object.entries(actions).map(([label, run]) => button(label, () => { dismiss(); run(); }, { className: "" }));
  line.classList.toggle("error", error);
  $("notice-text").textContent = text;
  $("notice-actions").replaceChildren(...buttons, button("×", dismiss, { name: "Dismiss this line" }));
  line.hidden = false;
}

export const notifyError = (text, actions = {}) => notify(text, actions, { error: true });

export function dismiss() {
  $("notice").hidden = true;
  $("notice-text").textContent = "";
}
