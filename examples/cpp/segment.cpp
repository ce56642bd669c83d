// Finds what a text names in a photograph, with a compiled SAM 3 and TVM's runtime library: no Python, no compiler.
//
//     segment FOLDER PHOTO.ppm TOKENS OUT [THRESHOLD]
//
// FOLDER is what `sam3-tvm compile` wrote. TOKENS is a file with the text's token ids (49406 2368 49407 is "cat"), which
// `sam3-tvm` computes in Python (harness/runtime/sam3/tokenizer.py). Every mask is written to OUT as an 8-bit PGM image.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;
namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using ffi::Tensor;
using Tensors = std::map<std::string, Tensor>;
using Shape = std::vector<int64_t>;

constexpr int64_t kFormat = 1;       // FORMAT in harness/runtime/manifest.py
constexpr size_t kAlignment = 64;    // bytes; compiled code may use aligned vector loads
constexpr int64_t kTextTokens = 32;  // what the text encoder reads
constexpr DLDevice kCpu{kDLCPU, 0};

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};
constexpr DLDataType kBool{kDLBool, 8, 1};

// ---------------------------------------------------------------------------------------------------------- tensors

// Memory that belongs to somebody else, or to the tensor.
struct Borrowed {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};
struct Owned {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + kAlignment - 1) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, bytes == 0 ? kAlignment : bytes);
    if (tensor->data == nullptr) throw std::bad_alloc();
    std::memset(tensor->data, 0, bytes);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::ShapeView view(const Shape& shape) { return {shape.data(), shape.size()}; }

Tensor zeros(const Shape& shape, DLDataType dtype) { return Tensor::FromNDAlloc(Owned(), view(shape), dtype, kCpu); }

template <typename T>
T* values(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

Tensor filled(const Shape& shape, bool value) {
  Tensor tensor = zeros(shape, kBool);
  std::memset(tensor.data_ptr(), value, tensor.numel());
  return tensor;
}

// ------------------------------------------------------------------------------------------------------------- JSON

ffi::Any field(const ffi::Any& object, const std::string& name) {
  return object.cast<json::Object>().at(ffi::String(name));
}
template <typename T>
T field(const ffi::Any& object, const std::string& name) {
  return field(object, name).cast<T>();
}

std::vector<std::string> names(const json::Array& specs) {
  std::vector<std::string> result;
  for (const ffi::Any& spec : specs) result.push_back(field<ffi::String>(spec, "name"));
  return result;
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// ---------------------------------------------------------------------------------------------------------- weights

// A safetensors file: the length of a JSON header in 8 bytes, the header, the data. It is mapped and never unmapped;
// a page is read when it is used first, and shared between processes.
Tensors map_weights(const fs::path& path) {
  int file = open(path.c_str(), O_RDONLY);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) throw std::runtime_error(path.string() + " cannot be read");
  void* memory = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  close(file);
  if (memory == MAP_FAILED) throw std::runtime_error(path.string() + " cannot be mapped");
  char* bytes = static_cast<char*>(memory);
  uint64_t length;
  std::memcpy(&length, bytes, sizeof(length));
  char* data = bytes + sizeof(length) + length;

  static const std::map<std::string, DLDataType> dtypes = {
      {"F32", kFloat32}, {"F16", {kDLFloat, 16, 1}}, {"I64", kInt64}, {"I32", {kDLInt, 32, 1}}, {"U16", {kDLUInt, 16, 1}},
      {"U8", kUInt8},    {"I8", {kDLInt, 8, 1}},     {"BOOL", kBool}};
  Tensors tensors;
  for (const auto& [name, entry] : json::Parse(ffi::String(bytes + sizeof(length), length)).cast<json::Object>()) {
    Shape shape;
    for (const ffi::Any& extent : field<json::Array>(entry, "shape")) shape.push_back(extent.cast<int64_t>());
    json::Array offsets = field<json::Array>(entry, "data_offsets");
    int64_t first = offsets[0].cast<int64_t>(), last = offsets[1].cast<int64_t>();
    DLDataType dtype = dtypes.at(field<ffi::String>(entry, "dtype"));
    Tensor tensor{nullptr};
    if (reinterpret_cast<uintptr_t>(data + first) % kAlignment == 0) {
      tensor = Tensor::FromNDAlloc(Borrowed{data + first}, view(shape), dtype, kCpu);
    } else {
      tensor = zeros(shape, dtype);
      std::memcpy(tensor.data_ptr(), data + first, last - first);
    }
    tensors.emplace(name.cast<ffi::String>(), tensor);
  }
  return tensors;
}

// ------------------------------------------------------------------------------------------------------------ model

class Model {
 public:
  explicit Model(const fs::path& folder) : manifest_(json::Parse(read_text(folder / "manifest.json"))) {
    if (field<int64_t>(manifest_, "format") != kFormat) throw std::runtime_error("another format: compile it again");
    ffi::Module library = ffi::Module::LoadFromFile((folder / "model.so").string());
    // Parallel loops are handed out part by part to whichever thread is free.
    if (auto hand_out = library->GetFunction("hand_out_parts", /*query_imports=*/true)) (*hand_out)();
    machine_ = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
    // Device type, device number, allocator that keeps memory for the next call (AllocatorType::kPooled).
    machine_.value()->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, 2);
    for (const auto& [name, entry] : field<json::Object>(manifest_, "entries")) {
      json::Array wanted = field<json::Array>(entry, "weights");
      if (wanted.empty()) continue;
      std::string entry_name = name.cast<ffi::String>();
      Tensors tensors = map_weights(folder / (entry_name + ".safetensors"));
      for (const ffi::Any& weight : wanted) {
        weights_[entry_name].push_back(tensors.at(weight.cast<ffi::String>()));
      }
    }
  }

  // How many "points" or "boxes" a prompt has room for.
  int64_t capacity(const char* kind) const { return field<int64_t>(field(manifest_, "capacity"), kind); }

  // The extent of an axis of an entry point's input.
  int64_t extent(const std::string& entry, const std::string& input, size_t axis) const {
    for (const ffi::Any& spec : field<json::Array>(field(field(manifest_, "entries"), entry), "inputs")) {
      if (field<ffi::String>(spec, "name") == input) return field<json::Array>(spec, "shape")[axis].cast<int64_t>();
    }
    throw std::runtime_error(entry + " has no input " + input);
  }

  // Calls an entry point, with tensors by name.
  Tensors operator()(const std::string& entry, const Tensors& inputs) {
    ffi::Any signature = field(field(manifest_, "entries"), entry);
    std::vector<Tensor> tensors;
    for (const std::string& name : names(field<json::Array>(signature, "inputs"))) tensors.push_back(inputs.at(name));
    tensors.insert(tensors.end(), weights_[entry].begin(), weights_[entry].end());
    std::vector<ffi::AnyView> arguments(tensors.begin(), tensors.end());

    auto start = std::chrono::steady_clock::now();
    ffi::Any result;
    machine_.value()->GetFunction(entry).value().CallPacked(arguments.data(), arguments.size(), &result);
    std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    std::printf("%-17s %9.1f ms\n", entry.c_str(), elapsed.count());

    Tensors outputs;
    std::vector<std::string> output_names = names(field<json::Array>(signature, "outputs"));
    if (auto tensor = result.try_cast<Tensor>()) {
      outputs.emplace(output_names[0], *tensor);
    } else {
      ffi::Array<Tensor> several = result.cast<ffi::Array<Tensor>>();
      for (size_t i = 0; i < output_names.size(); ++i) outputs.emplace(output_names[i], several[i]);
    }
    return outputs;
  }

 private:
  json::Value manifest_;
  ffi::Optional<ffi::Module> machine_;
  std::map<std::string, std::vector<Tensor>> weights_;
};

// ------------------------------------------------------------------------------------------------------------ files

// A binary PPM image, as uint8 [h, w, 3].
Tensor read_ppm(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int64_t width = 0, height = 0, largest = 0;
  auto number = [&file](int64_t& value) {
    while ((file >> std::ws).peek() == '#') file.ignore(1 << 20, '\n');
    file >> value;
  };
  file >> magic;
  number(width);
  number(height);
  number(largest);
  file.get();
  if (!file || magic != "P6" || largest != 255 || width < 1 || height < 1) {
    throw std::runtime_error(path.string() + " is not an 8-bit binary PPM image");
  }
  Tensor image = zeros({height, width, 3}, kUInt8);
  file.read(values<char>(image), image.numel());
  if (!file) throw std::runtime_error(path.string() + " is cut off");
  return image;
}

void write_pgm(const fs::path& path, const uint8_t* mask, int64_t width, int64_t height) {
  std::ofstream file(path, std::ios::binary);
  file << "P5\n" << width << " " << height << "\n255\n";
  std::vector<char> row(width);
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) row[x] = mask[y * width + x] ? '\xff' : '\0';
    file.write(row.data(), width);
  }
  if (!file.flush()) throw std::runtime_error(path.string() + " cannot be written");
}

Tensor read_tokens(const fs::path& path) {
  Tensor tokens = zeros({1, kTextTokens}, kInt64);
  std::istringstream text(read_text(path));
  int64_t count = 0;
  for (int64_t id; text >> id; ++count) {
    if (count == kTextTokens) throw std::runtime_error(path.string() + " has more than 32 tokens");
    values<int64_t>(tokens)[count] = id;
  }
  if (count < 2) throw std::runtime_error(path.string() + " has no tokens: at least 49406 49407");
  return tokens;
}

// ------------------------------------------------------------------------------------------------------------- main

void segment(const fs::path& folder, const fs::path& photo, const fs::path& token_file, const fs::path& out,
             float threshold) {
  Tensor image = read_ppm(photo), tokens = read_tokens(token_file);
  Model model(folder);

  // An image is encoded once, and can then be asked many prompts.
  Tensors prompt = model("encode_image", model("preprocess", {{"image", image}}));
  // Several texts may be encoded in one call; the only one begins at place 0.
  prompt.merge(model("encode_text", {{"tokens", tokens}, {"starts", zeros({1, kTextTokens}, kInt64)}}));
  // No points and no boxes: all places are padding. (x, y) and (cx, cy, w, h) would be from 0 to 1, label 1 is positive.
  int64_t points = model.capacity("points"), boxes = model.capacity("boxes");
  prompt.merge(Tensors{{"points", zeros({points, 1, 2}, kFloat32)},
                       {"points_mask", filled({1, points}, true)},
                       {"point_labels", zeros({points, 1}, kInt64)},
                       {"boxes", zeros({boxes, 1, 4}, kFloat32)},
                       {"boxes_mask", filled({1, boxes}, true)},
                       {"box_labels", zeros({boxes, 1}, kInt64)}});
  Tensors found = model("ground", prompt);
  prompt.merge(Tensors(found));

  const float* scores = values<float>(found.at("scores"));
  std::vector<int64_t> best;
  for (int64_t query = 0; query < found.at("scores").numel(); ++query) {
    if (scores[query] > threshold) best.push_back(query);
  }
  fs::create_directories(out);
  if (best.empty()) return;
  prompt.merge(model("embed_pixels", prompt));

  int64_t height = image.size(0), width = image.size(1);
  // The masks of some queries are predicted at once; where there are fewer, the other rows stay zero.
  int64_t together = model.extent("mask_predictor", "hs", 2), channels = model.extent("mask_predictor", "hs", 3);
  for (size_t start = 0; start < best.size(); start += together) {
    int64_t count = std::min<int64_t>(together, best.size() - start);
    Tensor hs = zeros({1, 1, together, channels}, kFloat32), kept = zeros({count}, kInt64);
    for (int64_t i = 0; i < count; ++i) {
      const float* query = values<float>(found.at("hs")) + best[start + i] * channels;
      std::copy(query, query + channels, values<float>(hs) + i * channels);
      values<int64_t>(kept)[i] = i;
    }
    Tensor logits = model("mask_predictor", {{"pixel_embed", prompt.at("pixel_embed")}, {"hs", hs}}).at("masks");
    Tensor masks = model("resize_masks", {{"masks", logits}, {"kept", kept}, {"like", image}}).begin()->second;
    for (int64_t i = 0; i < count; ++i) {
      int64_t query = best[start + i];
      const float* box = values<float>(found.at("boxes_xyxy")) + 4 * query;
      std::printf("query %3d  score %.6f  box %.2f %.2f %.2f %.2f\n", static_cast<int>(query), scores[query],
                  box[0] * width, box[1] * height, box[2] * width, box[3] * height);
      fs::path path = out / ("mask-" + std::to_string(query) + ".pgm");
      write_pgm(path, values<uint8_t>(masks) + i * height * width, width, height);
    }
  }
}

int main(int count, char** arguments) {
  if (count < 5 || count > 6) {
    std::cerr << "usage: segment FOLDER PHOTO.ppm TOKENS OUT [THRESHOLD]\n";
    return 2;
  }
  try {
    segment(arguments[1], arguments[2], arguments[3], arguments[4], count == 6 ? std::stof(arguments[5]) : 0.5f);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}
