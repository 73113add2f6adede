// The Vercel AI SDK against a running server: node vercel.mjs URL MODEL. Exits with an error if an answer is wrong.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
const models = {
  chat: openai.chat(name),
  responses: openai.responses(name),
  compatible: createOpenAICompatible({ name: "millrace", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" })(name),
};
const prompt = "What is the weather in Paris?";
const schema = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9) });
const common = { prompt, temperature: 0, maxOutputTokens: 150, maxRetries: 0 };

for (const [kind, model] of Object.entries(models)) {
  let asked = 0;
  const tools = {
    get_weather: tool({
      description: "Weather of a city.",
      inputSchema: schema,
      execute: async () => { asked += 1; return "sunny"; },
    }),
  };
  const toolChoice = { type: "tool", toolName: "get_weather" };
  const looped = await generateText({ ...common, model, tools, toolChoice, stopWhen: stepCountIs(2) });
  assert.equal(asked, 2, `${kind}: calls`);
  assert.equal(looped.steps.length, 2);
  const streamed = streamText({ ...common, model, tools, toolChoice, onError: ({ error }) => { throw error; } });
  let parts = 0;
  for await (const part of streamed.fullStream) parts += part.type === "tool-input-delta" ? 1 : 0;
  assert.equal((await streamed.toolCalls).length, 1, `${kind}: a streamed call`);
  assert.ok(parts > 1, `${kind}: arguments as they form`);
  if (kind !== "anthropic") {  // The SDK asks Anthropic's own models only for structured output.
    const whole = await generateText({ ...common, model, output: Output.object({ schema }) });
    schema.parse(whole.output);
    const flowing = streamText({ ...common, model, output: Output.object({ schema }) });
    for await (const _ of flowing.partialOutputStream);
    schema.parse(await flowing.output);
  }
  console.log(kind, "ok");
}
