// Vercel's `ai` with @ai-sdk/openai-compatible, and with @ai-sdk/openai over Responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { report, settings } from "./cases.mjs";

const { scripted, demo, scenes } = settings;
const model = (server, name) =>
  createOpenAICompatible({
    name: "triptych",
    baseURL: server.url,
    apiKey: server.key,
    supportsStructuredOutputs: true,
  })(name ?? server.model);
const common = { temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const Scene = z.object({ colour: z.enum(["red", "green", "blue", "purple"]), count: z.int().min(0).max(9) });
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === "Rome" ? scenes.result : "unknown"),
});
const file = (kind, data) => [
  { role: "user", content: [{ type: "file", mediaType: kind, data }, { type: "text", text: kind === "image/png" ? scenes.picture_question : scenes.sound_question }] },
];
const agent = { model: model(scripted), prompt: scenes.weather, tools: { weather }, stopWhen: stepCountIs(3), ...common };

await report({
  text: async () => (await generateText({ model: model(scripted), prompt: scenes.hello, ...common })).text,
  stream: async () => await streamText({ model: model(scripted), prompt: scenes.hello, ...common }).text,
  image: async () =>
    (await generateText({ model: model(demo), messages: file("image/png", scenes.picture_data), ...common })).text,
  audio: async () =>
    (await generateText({ model: model(demo), messages: file("audio/wav", scenes.sound_data), ...common })).text,
  multi_turn: async () => {
    const first = { role: "user", content: scenes.hello };
    const reply = (await generateText({ model: model(scripted), messages: [first], ...common })).response.messages;
    const messages = [first, ...reply, { role: "user", content: scenes.again }];
    return (await generateText({ model: model(scripted), messages, ...common })).text;
  },
  tools: async () => (await generateText(agent)).text,
  streamed_tools: async () => await streamText(agent).text,
  json_schema: async () => {
    const messages = file("image/png", scenes.picture_data);
    return (await generateText({ model: model(demo), messages, output: Output.object({ schema: Scene }), ...common }))
      .output;
  },
  reasoning: async () =>
    (await generateText({ model: model(scripted), prompt: scenes.think, ...common })).reasoningText,
  not_found: () => generateText({ model: model(scripted, "no-such"), prompt: "?", ...common }),
  types: async () => {
    try {
      await generateText({ model: model(scripted, "no-such"), prompt: "?", ...common });
    } catch (error) {
      return APICallError.isInstance(error);
    }
  },
  responses: async () => {
    const openai = createOpenAI({ baseURL: scripted.url, apiKey: scripted.key });
    return (await generateText({ ...agent, model: openai(scripted.model), temperature: undefined })).text;
  },
});
