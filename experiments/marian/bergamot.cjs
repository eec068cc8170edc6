// Translates lines with a folder of `ziggurat export --to firefox` by Bergamot's engine, as Firefox runs it:
//     npm install --prefix ENGINE @browsermt/bergamot-translator@0.4.9
//     node bergamot.cjs ENGINE FOLDER < text        # settings: those of FOLDER/config.yml
const fs = require('fs');
const path = require('path');

const [engine, folder] = process.argv.slice(2);
const worker = path.join(engine, 'node_modules/@browsermt/bergamot-translator/worker');
const products = {
  int8_prepare_a: 'int8PrepareAFallback',
  int8_prepare_b: 'int8PrepareBFallback',
  int8_prepare_b_from_transposed: 'int8PrepareBFromTransposedFallback',
  int8_prepare_b_from_quantized_transposed: 'int8PrepareBFromQuantizedTransposedFallback',
  int8_prepare_bias: 'int8PrepareBiasFallback',
  int8_multiply_and_add_bias: 'int8MultiplyAndAddBiasFallback',
  int8_select_columns_of_b: 'int8SelectColumnsOfBFallback',
};

function loaded(file, alignment) {
  const bytes = fs.readFileSync(path.join(folder, file));
  const memory = new Module.AlignedMemory(bytes.length, alignment);
  memory.getByteArrayView().set(bytes);
  return memory;
}

function main() {
  const named = (pattern) => fs.readdirSync(folder).filter((name) => pattern.test(name)).sort();
  const vocabularies = new Module.AlignedMemoryList();
  named(/vocab\..*\.spm$/).forEach((name) => vocabularies.push_back(loaded(name, 64)));
  const [shortlist] = named(/^lex\..*\.bin$/);
  const listed = shortlist ? loaded(shortlist, 64) : new Module.AlignedMemory(0, 64);
  const settings = fs.readFileSync(path.join(folder, 'config.yml'), 'utf8');
  const weights = loaded(named(/^model\..*\.bin$/)[0], 256);
  const model = new Module.TranslationModel(settings, weights, listed, vocabularies, null);
  const service = new Module.BlockingService({cacheSize: 0});
  for (const line of fs.readFileSync(0, 'utf8').split('\n').slice(0, -1)) {
    const input = new Module.VectorString();
    const options = new Module.VectorResponseOptions();
    input.push_back(line);
    options.push_back({qualityScores: false, alignment: false, html: false});
    const output = service.translate(model, input, options);
    console.log(output.get(0).getTranslatedText());
    [input, options, output].forEach((each) => each.delete());
  }
}

global.self = global;
global.Module = {
  instantiateWasm(info, accept) {
    const own = Object.entries(products).map(([name, ours]) => [name, (...given) => Module.asm[ours](...given)]);
    const binary = fs.readFileSync(path.join(worker, 'bergamot-translator-worker.wasm'));
    WebAssembly.instantiate(binary, {...info, wasm_gemm: Object.fromEntries(own)}).then((made) => accept(made.instance));
    return {};
  },
  onRuntimeInitialized: main,
};
eval.call(global, fs.readFileSync(path.join(worker, 'bergamot-translator-worker.js'), 'utf8'));
