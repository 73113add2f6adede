// A conversation as a tree: regenerating or editing adds a sibling, and each node remembers which child is shown.

let counter = 0;
const newId = () => `${Date.now().toString(36)}-${(counter++).toString(36)}`;

export const newTree = () => ({ nodes: { root: { id: "root", parent: null, role: "root", children: [], active: 0 } } });

export function addNode(tree, parent, fields) {
  const node = { id: newId(), parent, children: [], active: 0, content: "", ...fields };
  tree.nodes[node.id] = node;
  const above = tree.nodes[parent];
  above.children.push(node.id);
  above.active = above.children.length - 1;
  return node;
}

/** The shown nodes from the first message to the last. */
export function path(tree) {
  const shown = [];
  for (let node = tree.nodes.root; node.children.length;) {
    node = tree.nodes[node.children[node.active]];
    shown.push(node);
  }
  return shown;
}

export const lastOf = tree => path(tree).at(-1) ?? tree.nodes.root;
export const siblings = (tree, node) => tree.nodes[node.parent].children;

/** Show the sibling `by` places on. */
export function switchBranch(tree, node, by) {
  const parent = tree.nodes[node.parent];
  const at = parent.children.indexOf(node.id) + by;
  if (at >= 0 && at < parent.children.length) parent.active = at;
}

/** The messages that lead to `node`, the node itself excluded, in OpenAI's shape. */
export function messagesBefore(tree, node) {
  const above = [];
  for (let id = node.parent; id !== "root"; id = tree.nodes[id].parent) above.unshift(tree.nodes[id]);
  return above.filter(one => one.role !== "assistant" || one.content || one.toolCalls?.length).map(toMessage);
}

function toMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.toolCallId, content: node.content };
  if (node.role === "assistant") return node.toolCalls?.length
    ? { role: "assistant", content: node.content || null, tool_calls: node.toolCalls.map(call => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) }
    : { role: "assistant", content: node.content };
  if (!node.images?.length) return { role: "user", content: node.content };
  const images = node.images.map(url => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...(node.content ? [{ type: "text", text: node.content }] : []), ...images] };
}
