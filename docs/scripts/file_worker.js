// Browsers give pages from a disk no workers, and search runs in one. Here a hidden frame is one.
if (location.protocol === "file:") {
  class FileWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.answer(data);
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        inside.document.head.append(script);
      });
    }

    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = FileWorker; // the name by which Material's script knows where it runs
  window.Worker = FileWorker;
}
