use super::*;
use std::fs;

/// Returns the error message without the path of the folder.
fn sentence(folder: &Path, error: &ModelError) -> String {
    error.to_string().replace(&*folder.to_string_lossy(), "FOLDER")
}

/// Reads the template of a folder with these files and with modules.json.
fn read_from(files: &[(&str, &str)], system: Option<&str>) -> Result<PairTemplate, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    PairTemplate::read(folder.path(), true, system).map_err(|error| sentence(folder.path(), &error))
}

const BERT: &str = "sentence_bert_config.json";
const MESSAGES: (&str, &str) = (BERT, r#"{"modality_config": {"text": {}, "message": {"format": "auto"}}}"#);
/// Renders every message with its role, as chat templates do.
const CHAT: &str = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}";

/// Renders a pair with a template of this source and these special tokens.
fn render(source: &str, tokenizer: &str, query: &str, document: &str) -> Result<String, String> {
    read_from(&[MESSAGES, (FILE, source), (TOKENIZER, tokenizer)], None)?.render(query, document)
}

#[test]
fn a_template_has_the_variables_that_transformers_provides() {
    let pair = "{{ messages[0].content }}|{{ messages[1].content }}";
    for (source, expected) in [
        ("%", "q|d%"),
        // One line end at the end is removed, and blocks remove their line end and indentation.
        ("\n", "q|d"),
        ("\n\n", "q|d\n"),
        ("\r\n.", "q|d\n."),
        ("\n  {% if true %}\n  a\n  {% endif %}\nb", "q|d\n  a\nb"),
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ add_bos_token }}", "q|d<s></s>"),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "q|dTrue True True"),
        ("{% if add_generation_prompt %}never{% endif %}", "q|d"),
        (
            r#"{{ {"b": ["é", 1.5, none, true], "a": "<x> \"y\""} | tojson }}"#,
            r#"q|d{"b": ["é", 1.5, null, true], "a": "<x> \"y\""}"#,
        ),
        ("{{ messages[0] | tojson }}", r#"q|d{"role": "query", "content": "q"}"#),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "q|d013",
        ),
        ("{{ ' a '.strip() }}{{ 'abc'.startswith('ab') }}{{ 'a,b'.split(',')[1] }}", "q|daTrueb"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('z') }}{{ nothing }}", "q|dzz"),
        ("{{ '<&>' }}", "q|d<&>"),
    ] {
        let tokenizer = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true}"#;
        assert_eq!(
            render(&format!("{pair}{source}"), tokenizer, "q", "d"),
            Ok(expected.to_owned()),
            "{source}"
        );
    }
}

#[test]
fn contents_are_parts_if_the_files_or_the_template_require_it() {
    let format = |format: &str| format!(r#"{{"modality_config": {{"message": {{"format": "{format}"}}}}}}"#);
    let parts = "{% for m in messages %}[{{ m.role }}: {{ m.content[0].text }}]{% endfor %}";
    let either = "{% for m in messages %}[{{ m.role }}: {{ m.content if m.content is string else m['content'][0]['text'] ~ '!' }}]{% endfor %}";
    for (written, source, expected) in [
        ("auto", CHAT, "[system: s][query: q][document: d]"),
        ("flat", CHAT, "[system: s][query: q][document: d]"),
        ("auto", parts, "[system: s][query: q][document: d]"),
        ("structured", parts, "[system: s][query: q][document: d]"),
        ("structured", either, "[system: s!][query: q!][document: d!]"),
        ("flat", either, "[system: s][query: q][document: d]"),
        ("auto", either, "[system: s][query: q][document: d]"),
    ] {
        let template = read_from(&[(BERT, &format(written)), (FILE, source)], Some("s")).unwrap();
        assert_eq!(template.render("q", "d").unwrap(), expected, "{written} {source}");
    }
    let error = read_from(&[(BERT, &format("structured")), (FILE, CHAT)], None).unwrap_err();
    assert!(error.contains("`format` structured, but the template expects the content as text"), "{error}");
    let error = read_from(&[(BERT, &format("prose")), (FILE, CHAT)], None).unwrap_err();
    assert!(error.contains("`format` = prose of `message` is not supported"), "{error}");
    for system in [None, Some("")] {
        let template = read_from(&[MESSAGES, (FILE, CHAT)], system).unwrap();
        assert_eq!(template.render("q", "d").unwrap(), "[query: q][document: d]");
    }
}

#[test]
fn the_template_is_the_file_or_the_one_of_the_tokenizer() {
    let quoted = |source: &str| serde_json::Value::from(source).to_string();
    let one = format!(r#"{{"chat_template": {}}}"#, quoted(CHAT));
    let parts = "{% for m in messages %}({{ m.content[0]['text'] }}){% endfor %}";
    // With several templates, contents are typed parts regardless of their source.
    let several = format!(
        r#"{{"chat_template": [{{"name": "tools", "template": ""}}, {{"name": "default", "template": {}}}]}}"#,
        quoted(parts)
    );
    for (files, expected) in [
        (vec![MESSAGES, (TOKENIZER, one.as_str())], "[query: q][document: d]"),
        (vec![MESSAGES, (TOKENIZER, several.as_str())], "(q)(d)"),
        (vec![MESSAGES, (TOKENIZER, several.as_str()), (FILE, CHAT)], "[query: q][document: d]"),
    ] {
        assert_eq!(read_from(&files, None).unwrap().render("q", "d").unwrap(), expected, "{files:?}");
    }
    for (tokenizer, sentence) in [
        ("{}", "FOLDER/tokenizer_config.json: there is no chat template"),
        (r#"{"chat_template": null}"#, "there is no chat template"),
        (r#"{"chat_template": 3}"#, "neither a template nor a list"),
        (
            r#"{"chat_template": [{"name": "rag", "template": ""}, {"name": "tools", "template": ""}]}"#,
            "has rag, tools, but none is called default",
        ),
    ] {
        let error = read_from(&[MESSAGES, (TOKENIZER, tokenizer)], None).unwrap_err();
        assert!(error.contains(sentence), "{error}");
    }
}

#[test]
fn a_template_that_cannot_carry_a_pair_is_refused_when_it_is_read() {
    for (source, sentence) in [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "drops the query and the document:",
        ),
        ("{{ messages[0].content }}", "drops the document:"),
        ("{{ messages[1].content }}{% if messages[0].content %}{% endif %}", "drops the query:"),
        ("{% for m in messages %}", "chat_template.jinja: "),
        ("{{ messages[0].content | nonsense }}", "nonsense"),
        (
            "\n{{ raise_exception('roles must alternate') }}",
            "fails on a pair of texts: roles must alternate, line 2",
        ),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "takes more than 4000000 steps",
        ),
        ("{{ 'x' * 10000000000 }}", "takes more than 4000000 steps"),
    ] {
        let error = render(source, "{}", "q", "d").unwrap_err();
        assert!(error.contains(sentence), "{source}: {error}");
    }
}

#[test]
fn template_variables_are_defined_and_ambiguous_ones_are_rejected() {
    let with = |keys: &str| format!(r#"{{"modality_config": {{"message": {{}}}}, {keys}}}"#);
    let source = format!("{CHAT}{{{{ add_generation_prompt }}}} {{{{ options.thinking }}}}");
    let given = r#""processing_kwargs": {"chat_template": {"add_generation_prompt": true, "restore_suffix": true,
        "options": {"thinking": false}}, "text": {"padding": true}}"#;
    let template = read_from(&[(BERT, &with(given)), (FILE, &source)], None).unwrap();
    assert_eq!(template.render("q", "d").unwrap(), "[query: q][document: d]True False");
    for (config, sentence) in [
        (
            with(r#""processing_kwargs": {"chat_template": {"max_length": 9}}"#),
            "has `chat_template.max_length`",
        ),
        (with(r#""processing_kwargs": {"chat_template": {"tools": []}}"#), "has `chat_template.tools`"),
        (with(r#""processing_kwargs": {"text": {"max_length": 9}}"#), "has `max_length` for texts"),
        (
            with(r#""processing_kwargs": {"common": {"add_special_tokens": true}}"#),
            "has `add_special_tokens`",
        ),
        (with(r#""do_lower_case": true"#), "`do_lower_case` = true is not supported"),
        (r#"{"modality_config": {"text": {}}}"#.to_owned(), "`modality_config` has no `message`"),
        ("{}".to_owned(), "`modality_config` has no `message`"),
    ] {
        let error = read_from(&[(BERT, &config), (FILE, CHAT)], None).unwrap_err();
        assert!(error.contains(sentence), "{config}: {error}");
    }
}

#[test]
fn the_places_of_both_texts_are_found_whatever_they_hold() {
    let check = |source: &str, query: &str, document: &str, expected: [&str; 2]| {
        let template = read_from(&[MESSAGES, (FILE, source)], None).unwrap();
        let rendered = template.render(query, document).unwrap();
        let places = template.places(query, document, &rendered).unwrap();
        assert_eq!(places.map(|place| &rendered[place]), expected, "{source} of {query:?} and {document:?}");
    };
    let texts = ["", "0", "1 2", "0 0", "1 1 2", "2", "query", "é", "\u{1f355} a", "q: d: ", " "];
    let both = "q: {{ messages[0].content }} d: {{ messages[1].content }} 02";
    let swapped = "{{ messages[1].content }}1{{ messages[0].content }}";
    for query in texts {
        for document in texts {
            check(both, query, document, [query, document]);
            check(swapped, query, document, [query, document]);
        }
    }
    check("{{ messages[0].content | trim }}:{{ messages[1].content | trim }}", " a ", " b b\n", ["a", "b b"]);
    let repeated = "{{ messages[0].content }}-{{ messages[1].content }}-{{ messages[0].content }}.";
    check(repeated, "q", "d", ["", "q-d-q"]);
}
