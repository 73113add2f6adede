// What is known of the served models: names without aliases, what each can do, and its sampling defaults.

import { getJson } from "../common/api.js";

const pathOf = id => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}`;

export class Models {
  constructor() { Object.assign(this, { list: [], roots: new Map(), facts: new Map(), answers: "", isKnown: false }); }

  /** Ask the server. True if something differs from what was known. */
  async load() {
    const { data } = await getJson("/v1/models");
    const list = data.filter(model => (model.root ?? model.id) === model.id);
    const described = await Promise.all(list.map(({ id }) => getJson(pathOf(id)).catch(() => null)));
    const answers = JSON.stringify([data, described]);
    if (answers === this.answers) return false;
    const facts = new Map(list.map(({ id }, number) => [id, described[number]]).filter(([, one]) => one));
    // All at once: half of it would offer what a model cannot do, or compare it with itself.
    Object.assign(this, { list, facts, roots: new Map(data.map(model => [model.id, model.root ?? model.id])), answers, isKnown: true });
    return true;
  }

  /** The model's own name for a name or alias; an unknown name as it is. */
  rootOf(name) { return this.roots.get(name) ?? name; }
  has(name) { return this.list.some(model => model.id === name); }

  /** True unless the server says that the model cannot do it. */
  can(name, what) { return this.facts.get(this.rootOf(name))?.capabilities?.includes(what) ?? what !== "vision"; }
  sampling(name) { return this.facts.get(this.rootOf(name))?.sampling ?? {}; }
  /** A better model for this machine: only small models have one. */
  suggestion(name) { return this.facts.get(this.rootOf(name))?.suggestion ?? null; }
}
