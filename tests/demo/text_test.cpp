// SPDX-License-Identifier: Apache-2.0
// The demo's text: tokens, back from tokens to text, vocabulary, held-out part, baselines.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "examples/demo/baseline.h"
#include "examples/demo/text.h"

namespace logitless::cli::demo {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> tokens;
  split_words(text, [&](std::string_view token) { tokens.emplace_back(token); });
  return tokens;
}

std::string joined(std::string_view text) {
  Writer writer;
  split_words(text, [&](std::string_view token) { writer.add(token); });
  return writer.text();
}

TEST(DemoWords, MarksOwnTheBlanksAroundThem) {
  EXPECT_THAT(
      split("if a == b_1: return -1.5e3  # no,no"),
      ElementsAre("if", "a", " == ", "b_1", ": ", "return", " -", "1.5e3", " # ", "no", ",", "no"));
  EXPECT_THAT(split("x->y != z\n"), ElementsAre("x", "->", "y", " != ", "z", "\n"));
  EXPECT_THAT(split("f(g(1))"), ElementsAre("f", "(", "g", "(", "1", ")", ")"));
  EXPECT_THAT(split("\"\"\"Don't.\"\"\""), ElementsAre("\"\"\"", "Don't", ".", "\"\"\""));
  EXPECT_THAT(split("b's' it's"), ElementsAre("b", "'", "s", "' ", "it's"));
  EXPECT_THAT(split("end \n"), ElementsAre("end", "\n"));
}

TEST(DemoWords, LineBreaksOwnTheIndentation) {
  EXPECT_THAT(split("a:\n    b\n\n\n\tc"), ElementsAre("a", ":", "\n    ", "b", "\n\n    ", "c"));
  EXPECT_THAT(split("a \r\n  \r\nb"), ElementsAre("a", "\n\n", "b"));
}

TEST(DemoWords, KnowTheMarksOfUnicode) {
  EXPECT_THAT(split("caf\u00e9 \u201cyes\u201d\u2014no\u2026 don\u2019t"),
              ElementsAre("caf\u00e9", " \u201c", "yes", "\u201d", "\u2014", "no", "\u2026 ",
                          "don\u2019t"));
}

TEST(DemoWords, ComeBackAsTheyWere) {
  for (const char* text :
       {"def f(self, *args, **kw) -> int:\n    \"\"\"Say 'hi'.\n\n    It's 3.14 -- or not.\n    "
        "\"\"\"\n    return [x for x in args if x >= 0]  # [1]\n",
        "\u201cWell,\u201d she said, \u2018it is a cat\u2019s.\u2019 (Or two!)\n\nNext.",
        "a=b;c += d<<2; s = f'{x!r}' + r\"\\d+\" ... end", "x - 1, y -1, z-1"}) {
    const std::vector<std::string> tokens = split(text);
    EXPECT_EQ(split(joined(text)), tokens) << text;
  }
  EXPECT_EQ(joined("for x in y:\n    z(x, -1)\n"), "for x in y:\n    z(x, -1)\n");
  EXPECT_EQ(joined("one \u2014 two\u2014three"), "one \u2014 two\u2014three");
}

// A folder that is removed when the test ends.
struct Folder {
  fs::path path = fs::temp_directory_path() / (fmt::format("demo_text_test.{}", getpid()));
  Folder() { fs::create_directory(path); }
  ~Folder() { fs::remove_all(path); }
  fs::path write(const std::string& name, const std::string& text) const {
    fs::create_directories((path / name).parent_path());
    std::ofstream(path / name, std::ios::binary) << text;
    return path / name;
  }
};

// Returns a text with word i in it often(i) times, the words taking turns.
std::string repeated(int words, int often) {
  std::string text;
  for (int r = 0; r < often; ++r) {
    for (int i = 0; i < words; ++i) text += fmt::format("w{} ", i);
  }
  return text;
}

TEST(DemoText, HoldsOutWholeFilesWhereThereAreMany) {
  const Folder folder;
  for (int i = 0; i < 200; ++i) {
    folder.write(fmt::format("f{}", i), fmt::format("name{} {}", i, repeated(50, 1)));
  }
  const auto files = find_text({folder.path.string()});
  ASSERT_EQ(files.size(), 200u);
  const Text text = read_text(files, {});
  EXPECT_EQ(text.files, 200);
  EXPECT_EQ(text.heldout_files, 10);
  EXPECT_EQ(text.heldout.size(), 10u * 52);
  EXPECT_EQ(text.train.size(), 190u * 52);
  EXPECT_EQ(text.words.size(), 52u) << "words seen once are unknown";
  EXPECT_EQ(text.count[unknown_word], 190);
  EXPECT_EQ(text.count[document_start], 190);
  EXPECT_EQ(read_text(files, {}).heldout, text.heldout);
}

TEST(DemoText, HoldsOutBlocksOfAShortText) {
  const Folder folder;
  const Text text = read_text({folder.write("a", repeated(100, 40))}, {});
  EXPECT_EQ(text.heldout_files, 0);
  const auto starts = text.count[document_start];
  EXPECT_EQ(static_cast<int64_t>(text.train.size()) - starts, 3800);
  EXPECT_EQ(std::count_if(text.heldout.begin(), text.heldout.end(),
                          [](Token t) { return t != document_start; }),
            200);
}

TEST(DemoText, CapsTheVocabularyAtTheMostFrequent) {
  const Folder folder;
  const Text text =
      read_text({folder.write("a", repeated(1000, 3) + repeated(10, 200))}, {.vocab = 8});
  ASSERT_EQ(text.words.size(), 8u);
  for (size_t i = 2; i < 8; ++i) EXPECT_EQ(text.words[i].size(), 2u) << "not one of w0 to w9";
  int64_t total = 0;
  for (const int64_t count : text.count) total += count;
  EXPECT_EQ(total, static_cast<int64_t>(text.train.size()));
}

TEST(DemoText, TakesRareWordsToReachThirtyThousand) {
  const Folder folder;
  const Text text = read_text({folder.write("a", repeated(40000, 1))}, {});
  EXPECT_EQ(text.vocab(), 30002);
}

TEST(DemoText, RefusesWhatItCannotUse) {
  const Folder folder;
  EXPECT_THROW(find_text({(folder.path / "missing").string()}), BadInput);
  EXPECT_THROW(find_text({folder.path.string()}), BadInput) << "an empty folder";
  EXPECT_THROW(read_text({folder.write("empty", "")}, {}), BadInput);
  EXPECT_THROW(read_text({folder.write("short", "too short")}, {}), BadInput);
  EXPECT_THROW(read_text({folder.write("binary", std::string(5000, '\0'))}, {}), BadInput);
  EXPECT_THROW(read_text({folder.path / "gone"}, {}), BadInput);
}

TEST(DemoText, LeavesOutWhatIsNoTextOfAFolder) {
  const Folder folder;
  folder.write("a.py", "x");
  folder.write("b.bin", std::string("x\0y", 3));
  folder.write("__pycache__/c.py", "x");
  folder.write("deep/er/d.txt", "x");
  EXPECT_THAT(find_text({folder.path.string()}),
              ElementsAre(folder.path / "a.py", folder.path / "deep/er/d.txt"));
}

TEST(DemoBaselines, AreTheirFormulas) {
  Text text;
  text.train = {2, 3, 2, 3, 2, 4};
  text.heldout = {2, 3, 4};
  text.words = {"<unk>", "<document>", "a", "b", "c"};
  text.count = {0, 0, 3, 2, 1};
  const Baselines b = measure_baselines(text, std::vector<int64_t>{1, 2});
  EXPECT_NEAR(b.unigram, 1 / std::sqrt(3.0 / 11 * 2.0 / 11), 1e-9);
  // In the held-out text "a b" was seen in two of three cases, "b c" in none of two.
  const auto bigram = [](double k) {
    return 1 / std::sqrt((2 + k) / (3 + 5 * k) * k / (2 + 5 * k));
  };
  EXPECT_NEAR(b.bigram, bigram(b.k), 1e-9);
  for (double k = 1; k > 1e-6; k /= 2) EXPECT_LE(b.bigram, bigram(k) + 1e-9);
}

}  // namespace
}  // namespace logitless::cli::demo
