// SPDX-License-Identifier: Apache-2.0
#include "transcript.h"

#include <cxxabi.h>
#include <elf.h>
#include <fmt/core.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <regex>

// the linker defines it as the start of this program
extern "C" const char __executable_start;

namespace logitless::guards {
namespace {

using cuda::Parameter;

// Objects of the library or driver that the transcript creates begin with this mark, followed by
// their number.
constexpr uint64_t kMark = 0x6c6f6769746c6573;
struct Marked {
  uint64_t mark;
  const std::string* text;
};

// Returns the innermost name and its template arguments, without namespace and parameters:
//   void a::(anonymous namespace)::k<a::T, (a::Mode)1>(int)  ->  k<T, (Mode)1>
std::string short_name(const char* mangled) {
  int failed = 0;
  const std::unique_ptr<char, void (*)(void*)> demangled(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &failed), std::free);
  if (failed != 0) return mangled;
  static const std::regex scopes(R"((\(anonymous namespace\)|[A-Za-z_0-9]+)::)");
  std::string name = std::regex_replace(demangled.get(), scopes, "");
  if (name.starts_with("void ")) name.erase(0, 5);
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

std::string numbers(const auto* values, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += fmt::format("{}{}", i == 0 ? "" : "x", values[i]);
  return text;
}

template <class T>
T read(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

FunctionNames::FunctionNames() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::vector<char> program{std::istreambuf_iterator<char>(file), {}};
  const auto at = [&]<class T>(uint64_t offset, T) {
    T value;
    std::memcpy(&value, program.data() + offset, sizeof(T));
    return value;
  };
  const auto header = at(0, Elf64_Ehdr{});
  const auto section = [&](uint64_t i) {
    return at(header.e_shoff + i * header.e_shentsize, Elf64_Shdr{});
  };
  const auto start = reinterpret_cast<uintptr_t>(&__executable_start);
  const uintptr_t base = header.e_type == ET_DYN ? start : 0;
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr table = section(i);
    if (table.sh_type != SHT_SYMTAB) continue;
    const char* strings = program.data() + section(table.sh_link).sh_offset;
    for (uint64_t n = 0; n < table.sh_size / sizeof(Elf64_Sym); ++n) {
      const auto symbol = at(table.sh_offset + n * sizeof(Elf64_Sym), Elf64_Sym{});
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC) continue;
      names_[base + symbol.st_value] = strings + symbol.st_name;
    }
  }
}

std::string FunctionNames::of(const void* function) const {
  const auto found = names_.find(reinterpret_cast<uintptr_t>(function));
  return found == names_.end() ? "?" : short_name(found->second.c_str());
}

void Transcript::launch(const cudaLaunchConfig_t& config, const void* kernel, void** values,
                        const Parameter* parameters, int count) {
  ++launches_;
  const auto& [grid, block] = std::pair(config.gridDim, config.blockDim);
  text_ += fmt::format("{} grid {}x{}x{} block {}x{}x{} shared {}", functions_->of(kernel), grid.x,
                       grid.y, grid.z, block.x, block.y, block.z, config.dynamicSmemBytes);
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      text_ += fmt::format(" cluster {}", attribute.val.clusterDim.x);
    } else {
      text_ += fmt::format(" attribute {}", static_cast<int>(attribute.id));
    }
  }
  text_ += "\n";
  for (int i = 0; i < count; ++i) {
    std::vector<unsigned char> value(parameters[i].bytes);
    // Copied because the type needs the parameter's alignment.
    alignas(64) unsigned char aligned[4096];
    std::memcpy(aligned, values[i], value.size());
    parameters[i].clear_padding(aligned);
    text_ += fmt::format("  {}:{}\n", value.size(), words(aligned, value.size()));
  }
}

void Transcript::copy(void* to, const void* from, size_t bytes) {
  ++launches_;
  text_ += fmt::format("copy {} <- {} bytes {}\n", address(to), address(from), bytes);
}

void Transcript::encode(const Map& m, CUtensorMap* map) {
  const Marked marked{kMark, static_cast<const std::string*>(keep(fmt::format(
                                 "map({} type {} sizes {} strides {} box {} swizzle {} l2 {} "
                                 "outside {})",
                                 address(m.data), static_cast<int>(m.type),
                                 numbers(m.sizes, m.rank), numbers(m.strides, m.rank - 1),
                                 numbers(m.box, m.rank), static_cast<int>(m.swizzle),
                                 static_cast<int>(m.promotion), static_cast<int>(m.fill))))};
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &marked, sizeof(marked));
}

void* Transcript::layout(int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return keep(fmt::format("[{}x{} by {} type {}]", rows, columns, stride, type));
}
void* Transcript::description(int compute_type, int scale_type) {
  return keep(fmt::format("compute {} scale {}", compute_type, scale_type));
}
void* Transcript::preference() { return keep("preferring"); }

void Transcript::set(void* object, int attribute, const void* value, size_t bytes) {
  uint64_t number = 0;
  std::memcpy(&number, value, std::min(bytes, sizeof(number)));
  *static_cast<std::string*>(object) += fmt::format(" {}={}", attribute, number);
}

void Transcript::choose(const Operands& o, void* preference, cuda::lt::Algorithm* algorithm) {
  const Marked marked{
      kMark, static_cast<const std::string*>(keep(fmt::format(
                 "algorithm of {} {}", of(o), *static_cast<const std::string*>(preference))))};
  std::memcpy(algorithm, &marked, sizeof(marked));
}

void Transcript::multiply(const Operands& o, std::array<const void*, 6> alpha_a_b_beta_c_d,
                          const cuda::lt::Algorithm& algorithm, void* workspace, size_t bytes) {
  ++launches_;
  text_ += "product " + of(o);
  for (const void* p : alpha_a_b_beta_c_d) text_ += " " + address(p);
  text_ += fmt::format(" scratch {} of {}\n  {}\n", address(workspace), bytes,
                       *reinterpret_cast<const Marked*>(&algorithm)->text);
}

std::string Transcript::name_of(uint64_t p) const {
  auto found = memory_.upper_bound(p);
  if (found == memory_.begin()) return "";
  --found;
  const uint64_t offset = p - found->first;
  if (offset >> 40 != 0) return "";
  return offset == 0 ? found->second : fmt::format("{}+{:#x}", found->second, offset);
}

std::string Transcript::address(const void* p) const {
  if (p == nullptr) return "null";
  const std::string name = name_of(reinterpret_cast<uintptr_t>(p));
  return name.empty() ? "?" : name;
}

std::string Transcript::words(const unsigned char* value, size_t bytes) const {
  std::string text;
  size_t zeros = 0;
  const auto end_zeros = [&] {
    if (zeros > 0) text += fmt::format(" 0*{}", zeros);
    zeros = 0;
  };
  for (size_t i = 0; i < bytes;) {
    const size_t size = std::min<size_t>(8, bytes - i);
    uint64_t word = 0;
    std::memcpy(&word, value + i, size);
    if (word == kMark && i + sizeof(CUtensorMap) <= bytes) {
      end_zeros();
      text += " " + *read<Marked>(value + i).text;
      i += sizeof(CUtensorMap);
      continue;
    }
    i += size;
    if (word == 0) {
      ++zeros;
      continue;
    }
    end_zeros();
    const std::string name = name_of(word);
    text += name.empty() ? fmt::format(" {:x}", word) : " " + name;
  }
  end_zeros();
  return text;
}

std::string Transcript::of(const Operands& o) const {
  std::string text;
  for (const void* part : {o.description, o.a, o.b, o.c, o.d}) {
    text += (text.empty() ? "" : " ") + *static_cast<const std::string*>(part);
  }
  return text;
}

void* Transcript::keep(std::string text) { return &objects_.emplace_back(std::move(text)); }

}  // namespace logitless::guards
