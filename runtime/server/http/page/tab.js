// Values that a tab keeps until it is closed: the API key, the model, the open chat, the parameters.

export const tab = {
  get(name, otherwise) {
    try {
      return JSON.parse(sessionStorage.getItem(`enginewright-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(`enginewright-${name}`, JSON.stringify(value));
    } catch { /* full, or forbidden: the page does without */ }
  },
};
