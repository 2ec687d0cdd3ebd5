// SPDX-License-Identifier: Apache-2.0
// What a visitor sees while a call runs: the shaders that are compiled so far, and the seconds. And whether the results
// that stand are of the fields as they are now.

const EVERY = 100;  // ms

// Resolves after the browser has had time to draw, before the thread is busy again.
export const drawn = () => new Promise((resolve) => setTimeout(resolve, 20));

// Resolves to what the promise of work() gives; until then `element` shows the progress.
export async function showing(element, logitless, work) {
  const start = performance.now();
  const say = () => {
    const {asked, ready} = logitless.pipelines;
    const what = ready < asked ? `compiling shaders: ${ready} of ${asked}` : 'running';
    element.textContent = `${what}… ${((performance.now() - start) / 1000).toFixed(1)} s`;
  };
  const timer = setInterval(say, EVERY);
  try {
    const promised = work();
    say();
    return await promised;
  } finally {
    clearInterval(timer);
  }
}

// Shows `note` while now() is not what it was when the results were made: keep() is called with them, forget() without.
export function watching(note, now) {
  let kept = null;
  const look = () => (note.hidden = kept === null || kept === now());
  const keep = (value = now()) => {
    kept = value;
    look();
  };
  return {look, keep, forget: () => keep(null)};
}
