// The AI SDK on a running server: chat, streaming, tools, structured output, embeddings and errors.
//   npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
//   node tests/server/ai_sdk.mjs [http://127.0.0.1:8000] [MODEL] [images]
// With `images`, a model that sees is asked about one, and nothing else is tried.
import assert from 'node:assert'
import { embed, embedMany, generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { z } from 'zod'

const url = (process.argv[2] ?? 'http://127.0.0.1:8000').replace(/\/$/, '')
const name = process.argv[3] ?? 'smollm2'
const compatible = createOpenAICompatible({
  name: 'tandem', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true,
})
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })
const models = {
  compatible: compatible.chatModel(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  anthropic: anthropic(name),
}
const city = z.object({ name: z.string(), country: z.string() })
const weather = tool({
  description: 'Get the weather in a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
})
let failed = 0

async function example(title, run) {
  try {
    await run()
    console.log(`${title}: works`)
  } catch (error) {
    failed += 1
    console.log(`${title}: FAILS`, error?.responseBody ?? error)
  }
}

const png = 'iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEMLQkAKP8/wc53yE8AAAAASUVORK5CYII='
if (process.argv[4] === 'images') {
  for (const [kind, model] of Object.entries(models)) {
    const common = { model, maxRetries: 0, maxOutputTokens: 20 }
    const text = { type: 'text', text: 'What is this?' }
    const image = { type: 'image', image: Buffer.from(png, 'base64') }
    await example(`${kind} image`, async () => {
      const counts = []
      for (const content of [[text], [text, image]]) {
        const { usage } = await generateText({ ...common, messages: [{ role: 'user', content }] })
        counts.push(usage.inputTokens)
      }
      assert(counts[1] > counts[0] + 3, counts)
      const result = streamText({ ...common, messages: [{ role: 'user', content: [text, image] }] })
      for await (const part of result.fullStream) assert.notEqual(part.type, 'error')
      assert((await result.usage).inputTokens > counts[0] + 3)
    })
  }
  process.exit(failed ? 1 : 0)
}
for (const [kind, model] of Object.entries(models)) {
  const common = { model, maxRetries: 0, maxOutputTokens: 200 }
  await example(`${kind} text`, async () => {
    const { text, usage } = await generateText({ ...common, system: 'Be brief.', prompt: 'Say hello.' })
    assert(text && usage.outputTokens > 0)
  })
  await example(`${kind} stream`, async () => {
    const result = streamText({ ...common, prompt: 'Say hello.', onError: ({ error }) => { throw error } })
    let text = ''
    for await (const part of result.textStream) text += part
    assert(text && (await result.usage).outputTokens > 0)
  })
  await example(`${kind} tool`, async () => {
    const { toolCalls, toolResults } = await generateText({
      ...common, tools: { weather }, toolChoice: 'required', prompt: 'What is the weather in Paris?',
    })
    assert(toolCalls[0].input.city && toolResults[0].output.includes('sunny'))
  })
  await example(`${kind} tool, streamed`, async () => {
    const result = streamText({
      ...common, tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' },
      prompt: 'What is the weather in Paris?', onError: ({ error }) => { throw error },
    })
    const kinds = new Set()
    for await (const part of result.fullStream) kinds.add(part.type)
    assert(kinds.has('tool-call') && kinds.has('tool-result'))
  })
  await example(`${kind} steps`, async () => {
    const { steps } = await generateText({
      ...common, tools: { weather }, stopWhen: stepCountIs(3), prompt: 'What is the weather in Paris?',
    })
    assert(steps.length >= 1)
  })
  await example(`${kind} object`, async () => {
    const { output } = await generateText({
      ...common, output: Output.object({ schema: city }), prompt: 'A city, please.',
    })
    assert(output.name !== undefined)
  })
  await example(`${kind} object, streamed`, async () => {
    const result = streamText({
      ...common, output: Output.object({ schema: city }), prompt: 'A city, please.',
      onError: ({ error }) => { throw error },
    })
    let last
    for await (const part of result.partialOutputStream) last = part
    assert(last?.country !== undefined)
  })
  await example(`${kind} error`, async () => {
    const wrong = { compatible: compatible.chatModel, chat: openai.chat, responses: openai.responses, anthropic }[kind]
    await assert.rejects(generateText({ ...common, model: wrong('none-such'), prompt: 'Hi' }), (error) => {
      assert.equal(error.statusCode, 404)
      assert.match(error.message, /none-such/)
      return true
    })
  })
}
for (const [kind, model] of Object.entries({
  compatible: compatible.embeddingModel(name), openai: openai.embedding(name),
})) {
  await example(`${kind} embeddings`, async () => {
    const { embedding } = await embed({ model, value: 'a' })
    const { embeddings } = await embedMany({ model, values: ['a', 'b'] })
    assert(embedding.length > 0 && embeddings.length === 2)
  })
}
process.exit(failed ? 1 : 0)
