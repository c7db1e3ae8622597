// Calls of API.md with the client that openapi-generator makes for Java: `java Calls URL`. Prints what the answers say as
// JSON, the same members as each program of this folder.

import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.CharactersApi;
import org.openapitools.client.api.InformationApi;
import org.openapitools.client.api.LikelihoodApi;
import org.openapitools.client.api.OperationApi;
import org.openapitools.client.api.TextApi;
import org.openapitools.client.model.*;

public class Calls {
    static final long SEED = (1L << 53) - 1;

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(arguments[0]);
        TextApi text = new TextApi(client);
        LikelihoodApi likelihood = new LikelihoodApi(client);
        CharactersApi characters = new CharactersApi(client);
        InformationApi information = new InformationApi(client);
        Map<String, Object> said = new LinkedHashMap<>();

        GenerateAnswer seeded = text.generate(new GenerateRequest().prompt("ab").maxTokens(8L).seed(SEED), null);
        GenerateChoice choice = seeded.getChoices().get(0);
        said.put("seeded", List.of(choice.getText(), choice.getSeed(), seeded.getChargpt().getSeeds()));
        GenerateAnswer drawn = text.generate(new GenerateRequest().prompt("ab").maxTokens(8L), null);
        choice = drawn.getChoices().get(0);
        said.put("drawn", List.of(choice.getText(), choice.getSeed(), drawn.getChargpt().getSeeds()));

        Completion completion = text.createCompletion(
            new CompletionRequest().prompt(List.of("ab", "cd")).maxTokens(8L).seed(List.of(SEED, 7L)).logprobs(1L)
                .stop(List.of("e", "f")).logitBias(Map.of("g", -2.5)), null);
        said.put("completions", completion.getChoices().stream().map(it -> List.of(
            it.getText(), it.getSeed(), it.getFinishReason().getValue(), it.getLogprobs().getTokenLogprobs())).toList());
        ScoreAnswer score = likelihood.score(new ScoreRequest().texts(List.of("abc", "cb")), null);
        said.put("scores", score.getData().stream().map(it -> List.of(it.getNats(), it.getCharacters())).toList());
        NextCharacter next = likelihood.nextCharacter(new NextRequest().prompt("ab"), null).getData().get(0)
            .getDistribution().get(0);
        said.put("next", List.of(next.getCharacter(), next.getId(), next.getProbability()));
        List<Long> tokens = characters.tokenize(new TokenizeRequest().prompt("abc"), null).getTokens();
        said.put("tokens", tokens);
        said.put("text", characters.detokenize(new DetokenizeRequest().tokens(tokens), null).getPrompt());
        TokenizerInfo tokenizer = characters.getTokenizerInfo(null);
        said.put("vocab_size", tokenizer.getVocabSize());
        said.put("pad_token", tokenizer.getPadToken());
        String model = information.listModels(null).getData().get(0).getId();
        said.put("model", information.getModel(model, null).getId());
        Info info = information.getInfo(null);
        said.put("info", List.of(info.getModel().getVocabulary(), info.getLimits().getMaxBodyBytes()));
        said.put("status", new OperationApi(client).readyz(null).getStatus().getValue());
        try {
            text.generate(new GenerateRequest().prompt("ab").maxTokens(-1L), null);
        } catch (ApiException error) {
            ErrorDetails details = client.getObjectMapper()
                .readValue(error.getResponseBody(), org.openapitools.client.model.Error.class).getError();
            said.put("error", List.of(error.getCode(), details.getParam(), details.getType().getValue()));
        }
        System.out.println(new ObjectMapper().writeValueAsString(said));
    }
}
