// The official client of OpenAI for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { report, settings } from "./cases.mjs";

const { scripted, demo, scenes } = settings;
const connect = (server, key) => new OpenAI({ baseURL: server.url, apiKey: key ?? server.key, maxRetries: 0 });
const user = (content) => ({ role: "user", content });
const ask = (server, messages, fields = {}) =>
  connect(server).chat.completions.create({ model: server.model, messages, temperature: 0, ...fields });
const Scene = z.object({ colour: z.enum(["red", "green", "blue", "purple"]), count: z.int().min(0).max(9) });
const tools = [scenes.tool];

await report({
  text: async () => (await ask(scripted, [user(scenes.hello)])).choices[0].message.content,
  stream: async () => {
    let text = "";
    for await (const chunk of await ask(scripted, [user(scenes.hello)], { stream: true }))
      text += chunk.choices[0]?.delta.content ?? "";
    return text;
  },
  image: async () => (await ask(demo, [user(scenes.picture)])).choices[0].message.content,
  audio: async () => (await ask(demo, [user(scenes.sound)])).choices[0].message.content,
  multi_turn: async () => {
    const first = (await ask(scripted, [user(scenes.hello)])).choices[0].message;
    const turns = [user(scenes.hello), first, user(scenes.again)];
    return (await ask(scripted, turns)).choices[0].message.content;
  },
  tools: async () => {
    const first = (await ask(scripted, [user(scenes.weather)], { tools })).choices[0].message;
    const call = first.tool_calls[0];
    const result = { role: "tool", tool_call_id: call.id, content: scenes.result };
    const last = await ask(scripted, [user(scenes.weather), first, result], { tools });
    return [call.function, last.choices[0].message.content];
  },
  streamed_tools: async () => {
    const stream = connect(scripted).chat.completions.stream({
      model: scripted.model,
      messages: [user(scenes.weather)],
      tools,
    });
    return (await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function;
  },
  json_schema: async () => {
    const answer = await connect(demo).chat.completions.parse({
      model: demo.model,
      messages: [user(scenes.picture)],
      response_format: zodResponseFormat(Scene, "scene"),
      max_tokens: 200,
    });
    return answer.choices[0].message.parsed;
  },
  json_mode: async () => {
    const answer = await ask(scripted, [user(scenes.json)], { response_format: { type: "json_object" } });
    return JSON.parse(answer.choices[0].message.content);
  },
  not_found: () => connect(scripted).chat.completions.create({ model: "no-such", messages: [user("?")] }),
  wrong_key: () => connect(scripted, "wrong").models.list(),
  types: async () => {
    try {
      await connect(scripted).chat.completions.create({ model: "no-such", messages: [user("?")] });
    } catch (error) {
      return error instanceof OpenAI.NotFoundError;
    }
  },
});
