// One case for each feature of a client; a run prints what every case found, as JSON.
export const settings = JSON.parse(process.argv[2]);

export async function report(cases) {
  const found = {};
  for (const [name, run] of Object.entries(cases)) {
    try {
      found[name] = await run();
    } catch (error) {
      found[name] = { error: `${error.name}: ${error.message}`, status: error.status ?? error.statusCode };
    }
  }
  console.log(JSON.stringify(found));
}
